"""Problems made into prompts: rendered, tokenised, and handed out in an order that can be resumed.

In: a list of `Problem`, the source's settings, a Hugging Face tokenizer. Out: `trajectory.Prompt`s. The order
is a function of the seed and the epoch alone, so a saved position is enough to go on exactly where a run
stopped.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_sparse_rl.data.problems import Message, Problem
from megatron_sparse_rl.data.settings import SourceSettings
from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.trajectory import Prompt

logger = logging.getLogger(__name__)


def render(problem: Problem, settings: SourceSettings, tokenizer: Any) -> str:
    """The text that the model is given.

    A string prompt is put into the template and becomes the user's turn; a list of messages stays as it is,
    and gets the system message only where it has none of its own. Example turns come after the system
    message. Without the chat template the string prompt in its template is all there is.

    Raises SettingError where the tokenizer has no chat template, where a list of messages comes without one
    applied, and where the template refuses the messages.
    """
    if not settings.chat_template:
        if not isinstance(problem.prompt, str):
            raise SettingError(
                "chat_template=false: the prompts are lists of messages, which only a chat template turns "
                "into text; set chat_template=true"
            )
        return settings.template.replace("{prompt}", problem.prompt)
    if not getattr(tokenizer, "chat_template", None):
        raise SettingError(
            "chat_template=true: the model's tokenizer has no chat template; set chat_template=false, or "
            "use a model with one"
        )
    import jinja2

    try:
        text = tokenizer.apply_chat_template(
            _turns(problem, settings), tokenize=False, add_generation_prompt=True
        )
    except jinja2.TemplateError as error:
        raise SettingError(
            f"chat_template=true: the model's chat template refuses the messages: {error}; change system or "
            "examples, or set chat_template=false"
        ) from None
    return str(text)


def _turns(problem: Problem, settings: SourceSettings) -> list[Message]:
    def around(question: str) -> str:
        return settings.template.replace("{prompt}", question)

    own: list[Message] = (
        [{"role": "user", "content": around(problem.prompt)}]
        if isinstance(problem.prompt, str)
        else list(problem.prompt)
    )
    system = [message for message in own[:1] if message["role"] == "system"]
    rest = own[len(system) :]
    if not system and settings.system:
        system = [{"role": "system", "content": settings.system}]
    shown: list[Message] = []
    for question, answer in settings.examples:
        shown += [{"role": "user", "content": around(question)}, {"role": "assistant", "content": answer}]
    return [*system, *shown, *rest]


def tokenize(text: str, settings: SourceSettings, tokenizer: Any) -> np.ndarray:
    """int64 [P]. A chat template writes the special tokens it wants itself; plain text gets those of the
    tokenizer, unless it already starts with the beginning-of-sequence token."""
    bos = tokenizer.bos_token
    written = settings.chat_template or (bos is not None and text.startswith(bos))
    return np.asarray(tokenizer(text, add_special_tokens=not written)["input_ids"], dtype=np.int64)


class PromptSource:
    """Hands out the prompts of a source, epoch after epoch.

    `epochs=0` never ends. Prompts of more than `max_prompt_tokens` tokens are left out; each is counted once
    in `dropped_overlong`, when it is first met. Raises SettingError when all of them are too long, and what
    `render` raises.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        settings: SourceSettings,
        tokenizer: Any,
        *,
        max_prompt_tokens: int,
        shuffle: bool,
        epochs: int,
        seed: int,
    ) -> None:
        if not problems:
            raise SettingError("the source has no problems to hand out; give path or task some")
        check_rendering(problems[0], settings, tokenizer)
        self._problems = tuple(problems)
        self._settings = settings
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._shuffle = shuffle
        self._epochs = epochs
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._handed_out = 0
        self._overlong: set[int] = set()
        self._order = self._order_of(0)
        self._fingerprint = self._make_fingerprint()

    def __len__(self) -> int:
        """Problems of one epoch, over-long ones included."""
        return len(self._problems)

    @property
    def dropped_overlong(self) -> int:
        return len(self._overlong)

    @property
    def exhausted(self) -> bool:
        """True when `epochs` passes are over and `take` gives no more."""
        return self._find_next() is None

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts; fewer, or none, when the epochs are over."""
        taken: list[Prompt] = []
        known = self.dropped_overlong
        while len(taken) < n and (found := self._find_next()) is not None:
            taken.append(found)
            self._handed_out += 1
            self._position += 1
        if self.dropped_overlong > known:
            logger.info(
                "left out %d prompts of more than %d tokens so far, of %d",
                self.dropped_overlong,
                self._max_prompt_tokens,
                len(self),
            )
        return taken

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain JSON values."""
        return {
            "fingerprint": self._fingerprint,
            "epoch": self._epoch,
            "position": self._position,
            "handed_out": self._handed_out,
            "overlong": sorted(self._overlong),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the last prompt handed out when `state` was taken. Raises SettingError when `state`
        belongs to other problems, rendering, seed or prompt limit."""
        if state["fingerprint"] != self._fingerprint:
            raise SettingError(
                "the saved data order belongs to another data set, rendering, seed, shuffle or "
                "rollout.max_prompt_tokens than the configured one; resume with the settings of the saved "
                "run, or start a new run in another output_dir"
            )
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._handed_out = int(state["handed_out"])
        self._overlong = {int(row) for row in state["overlong"]}
        self._order = self._order_of(self._epoch)

    def _find_next(self) -> Prompt | None:
        """The prompt at the next usable position, to which the position moves; None when epochs are over."""
        while True:
            if self._position == len(self._order):
                if self._epochs and self._epoch + 1 >= self._epochs:
                    return None
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            row = int(self._order[self._position])
            if row not in self._overlong:
                prompt = make_prompt(self._handed_out, self._problems[row], self._settings, self._tokenizer)
                if len(prompt.token_ids) <= self._max_prompt_tokens:
                    return prompt
                self._overlong.add(row)
                if len(self._overlong) == len(self._problems):
                    raise all_overlong(len(self._problems), self._max_prompt_tokens)
            self._position += 1

    def _order_of(self, epoch: int) -> np.ndarray:
        """int64 [problems]: the rows in the order of that epoch."""
        if not self._shuffle:
            return np.arange(len(self._problems))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._problems))

    def _make_fingerprint(self) -> str:
        """SHA-256 of everything that decides which prompt comes at which position."""
        source = self._settings
        rendering = [source.template, source.system, source.examples, source.chat_template]
        digest = hashlib.sha256()
        digest.update(json.dumps([rendering, self._max_prompt_tokens, self._shuffle, self._seed]).encode())
        for problem in self._problems:
            row = [problem.prompt, problem.answer, problem.metadata]
            digest.update(json.dumps(row, sort_keys=True).encode())
        return digest.hexdigest()


def check_rendering(problem: Problem, settings: SourceSettings, tokenizer: Any) -> None:
    """Raises what `render` raises, and SettingError for a string that already holds chat markers and would be
    wrapped into the chat template a second time."""
    render(problem, settings, tokenizer)
    if settings.chat_template and isinstance(problem.prompt, str):
        markers = [token for token in tokenizer.all_special_tokens if token in problem.prompt]
        if markers:
            raise SettingError(
                f"chat_template=true: the prompts already hold the chat marker {markers[0]!r}; set "
                "chat_template=false"
            )


def make_prompt(index: int, problem: Problem, settings: SourceSettings, tokenizer: Any) -> Prompt:
    """The problem rendered and tokenised, under the given index."""
    text = render(problem, settings, tokenizer)
    return Prompt(index, tokenize(text, settings, tokenizer), text, problem.answer, problem.metadata)


def all_overlong(count: int, max_prompt_tokens: int) -> SettingError:
    return SettingError(
        f"rollout.max_prompt_tokens={max_prompt_tokens} is less than every one of the {count} prompts has; "
        "raise it, or shorten the prompts"
    )
