"""Settings of what is written for people to look at."""

from megatron_sparse_rl.settings import setting, settings


@settings
class ObservabilitySettings:
    """TensorBoard, the console, the metrics file and sample texts."""

    tensorboard: bool = setting(True, "Write TensorBoard event files to <output_dir>/tensorboard.")
    samples_per_step: int = setting(
        4, "Sampled texts kept a step, in <output_dir>/samples.jsonl and TensorBoard.", ge=0
    )
    timeline_steps: int = setting(
        10,
        "Last steps whose requests are kept in <output_dir>/timeline, for the picture of what ran when.",
        unit="steps",
        ge=0,
    )
    retained_steps: int = setting(
        10,
        "Last steps for which <output_dir>/sparse_kv keeps what each request held of its KV cache, and a "
        "picture of the positions that one of them retained; with rollout.sparse_kv only.",
        unit="steps",
        ge=0,
    )
    progress: bool = setting(True, "One line a step on the console, and a progress bar on a terminal.")
