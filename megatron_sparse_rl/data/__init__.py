"""Prompt sources: JSONL and Parquet files, procedural tasks; a deterministic order that can be resumed."""
