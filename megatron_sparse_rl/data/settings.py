"""Settings of the prompt sources."""

from typing import Any

from pydantic import model_validator

from megatron_sparse_rl.settings import setting, settings


@settings
class SourceSettings:
    """One source of problems: a JSONL or Parquet file, or a procedural task of reasoning-gym."""

    path: str = setting("", "JSONL or Parquet file, chosen by its ending (.jsonl, .parquet).")
    task: str = setting("", "Name of a reasoning-gym task, instead of a file.")
    task_options: dict[str, Any] = setting(dict, "Options of that task, as reasoning-gym names them.")
    size: int = setting(
        0, "Problems to take; 0: the whole file (a task needs a size).", unit="problems", ge=0
    )
    seed: int = setting(0, "Seed of the task's generator.")
    prompt_column: str = setting(
        "prompt",
        "Column with the prompt: a string or a list of {role, content} messages; `a.b` reaches into a column "
        "of mappings.",
    )
    answer_column: str = setting(
        "answer",
        "Column with the reference answer; `reward_model.ground_truth` reaches into a column of mappings.",
    )
    template: str = setting(
        "{prompt}",
        "Text put around a string prompt and around the questions of `examples`; {prompt} stands for it.",
    )
    system: str = setting("", "System message for rows without one, where the chat template is applied.")
    examples: tuple[tuple[str, str], ...] = setting(
        (), "Question/answer pairs shown as earlier turns of the chat."
    )
    chat_template: bool = setting(
        True, "Apply the tokenizer's chat template; off: the text is tokenised as it stands."
    )

    @model_validator(mode="after")
    def _check(self) -> "SourceSettings":
        if self.path and self.task:
            raise ValueError(f"path={self.path!r} and task={self.task!r} are both set; keep one of them")
        if self.task and not self.size:
            raise ValueError(f"task={self.task!r} needs size > 0: the number of problems to generate")
        if self.task_options and not self.task:
            raise ValueError(f"task_options={self.task_options!r} has no effect without task; set task")
        if reserved := sorted({"seed", "size"} & set(self.task_options)):
            raise ValueError(
                f"task_options.{reserved[0]} is set by {reserved[0]} of the source; set it there"
            )
        if "{prompt}" not in self.template:
            raise ValueError(
                f"template={self.template!r} does not contain {{prompt}}, so the question would be lost"
            )
        if not self.chat_template and (self.system or self.examples):
            raise ValueError(
                "chat_template=false leaves no place for system and examples; write them into template, or "
                "set chat_template=true"
            )
        return self


@settings
class DataSettings:
    """Training and held-out problems."""

    train: SourceSettings = setting(SourceSettings, "Problems to learn from.")
    eval: SourceSettings = setting(
        SourceSettings,
        "Held-out problems (none when it names neither path nor task): repeated ones are taken once, and "
        "those also found in the training set are removed from the training set.",
    )
    shuffle: bool = setting(True, "Shuffle the training problems anew in every epoch, by the run's seed.")
    epochs: int = setting(0, "Passes over the training problems; 0: as many as the steps need.", ge=0)
