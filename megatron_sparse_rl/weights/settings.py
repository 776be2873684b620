"""Settings of the export of weights."""

from typing import Literal

from megatron_sparse_rl.settings import setting, settings


@settings
class ExportSettings:
    """What `megatron-sparse-rl export` writes."""

    folder: str = setting("", "New folder of the Hugging Face checkpoint; the command's second argument.")
    precision: Literal["auto", "bf16", "fp32"] = setting(
        "auto", "Precision of the exported weights; auto: the learner's."
    )
