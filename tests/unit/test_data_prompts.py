"""Rendering, tokenising, and an order that goes on exactly where it stopped."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron_sparse_rl.data.problems import Problem
from megatron_sparse_rl.data.prompts import PromptSource, render, tokenize
from megatron_sparse_rl.data.settings import DataSettings, SourceSettings
from megatron_sparse_rl.data.sources import build_sources
from megatron_sparse_rl.settings import SettingError

BOS, USER, END = "<bos>", "<user>", "<end>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a character, and a beginning-of-sequence token put before every text."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocab = {token: i for i, token in enumerate(["<unk>", BOS, USER, END, *characters])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=BOS, unk_token="<unk>", additional_special_tokens=[USER, END]
    )
    tokenizer.chat_template = chat_template
    return tokenizer


TOKENIZER = make_tokenizer()
PLAIN = SourceSettings(chat_template=False)


def make_source(count: int = 5, *, prompts: list[str] | None = None, **options: Any) -> PromptSource:
    problems = [Problem(text, str(i)) for i, text in enumerate(prompts or [f"q{i}" for i in range(count)])]
    choice: dict[str, Any] = {"max_prompt_tokens": 64, "shuffle": True, "epochs": 0, "seed": 0, **options}
    return PromptSource(problems, choice.pop("settings", PLAIN), TOKENIZER, **choice)


def answers(source: PromptSource, n: int) -> list[str]:
    return [prompt.answer for prompt in source.take(n)]


# Rendering


def test_template_system_and_examples_surround_a_string_prompt() -> None:
    settings = SourceSettings(
        template="{prompt} Use {x} and \\boxed{}.", system="S", examples=(("1+1", "2"),)
    )
    text = render(Problem("2+2", "4"), settings, TOKENIZER)
    around = "Use {x} and \\boxed{}."
    assert text == (
        f"<bos><system>S<end><user>1+1 {around}<end><assistant>2<end><user>2+2 {around}<end><assistant>"
    )


def test_messages_keep_their_own_system_message_and_examples_come_after_it() -> None:
    own = ({"role": "system", "content": "own"}, {"role": "user", "content": "q"})
    settings = SourceSettings(template="<<{prompt}>>", system="S", examples=(("e", "a"),))
    text = render(Problem(own, ""), settings, TOKENIZER)
    assert text == "<bos><system>own<end><user><<e>><end><assistant>a<end><user>q<end><assistant>"
    text = render(Problem(own[1:], ""), settings, TOKENIZER)
    assert text.startswith("<bos><system>S<end>")


def test_without_the_chat_template_the_text_stands_as_it_is() -> None:
    settings = SourceSettings(template="Q: {prompt}\nA:", chat_template=False)
    assert render(Problem("{prompt}?", ""), settings, TOKENIZER) == "Q: {prompt}?\nA:"


def test_renderings_that_cannot_be_are_refused() -> None:
    messages = Problem(({"role": "user", "content": "q"},), "")
    with pytest.raises(SettingError, match="chat_template=false: the prompts are lists of messages"):
        render(messages, PLAIN, TOKENIZER)
    with pytest.raises(SettingError, match="tokenizer has no chat template; set chat_template=false"):
        render(messages, SourceSettings(), make_tokenizer(None))
    picky = make_tokenizer("{{ raise_exception('no system role') }}")
    with pytest.raises(SettingError, match="refuses the messages: no system role"):
        render(messages, SourceSettings(), picky)


def test_a_prompt_that_holds_chat_markers_is_not_wrapped_twice() -> None:
    with pytest.raises(SettingError, match=r"already hold the chat marker '<user>'; set chat_template=false"):
        make_source(prompts=["<user>q<end>"], settings=SourceSettings())
    assert make_source(prompts=["<user>q<end>"]).take(1)[0].text == "<user>q<end>"


@pytest.mark.parametrize("settings", [SourceSettings(), PLAIN])
def test_beginning_of_sequence_comes_once(settings: SourceSettings) -> None:
    bos = TOKENIZER.bos_token_id
    for text in ("q", "<bos>q"):
        ids = tokenize(render(Problem(text, ""), settings, TOKENIZER), settings, TOKENIZER).tolist()
        expected = 2 if settings.chat_template and text.startswith(BOS) else 1
        assert ids.count(bos) == expected
        assert ids[0] == bos


def test_a_chat_template_without_beginning_of_sequence_gets_none_added() -> None:
    tokenizer = make_tokenizer(TEMPLATE.removeprefix("{{ bos_token }}"))
    settings = SourceSettings()
    ids = tokenize(render(Problem("q", ""), settings, tokenizer), settings, tokenizer).tolist()
    assert ids[0] == tokenizer.convert_tokens_to_ids("<user>")


# Order


def test_every_epoch_holds_every_problem_once_in_another_order() -> None:
    source = make_source(20)
    epochs = [answers(source, 20) for _ in range(3)]
    assert all(sorted(epoch) == sorted(map(str, range(20))) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert answers(make_source(20), 60) == [*epochs[0], *epochs[1], *epochs[2]]
    assert answers(make_source(20, seed=1), 20) != epochs[0]
    assert answers(make_source(3, shuffle=False), 7) == ["0", "1", "2", "0", "1", "2", "0"]


def test_indices_are_running_positions() -> None:
    source = make_source(3)
    assert [prompt.index for prompt in source.take(4) + source.take(3)] == list(range(7))


def test_epochs_end_the_source() -> None:
    source = make_source(3, epochs=2)
    assert len(source.take(5)) == 5
    assert not source.exhausted
    assert len(source.take(5)) == 1
    assert source.exhausted
    assert source.take(5) == []


def test_overlong_prompts_are_left_out_counted_once_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    source = make_source(
        prompts=["a" * 9, "bb", "c" * 11, "d"], shuffle=False, max_prompt_tokens=10, epochs=3
    )
    with caplog.at_level(logging.INFO):
        assert answers(source, 100) == ["0", "1", "3"] * 3
    assert source.dropped_overlong == 1
    assert [record.getMessage() for record in caplog.records] == [
        "left out 1 prompts of more than 10 tokens so far, of 4"
    ]


def test_a_source_that_ends_in_overlong_prompts_is_exhausted_before_them() -> None:
    source = make_source(prompts=["a", "b" * 99], shuffle=False, epochs=1)
    source.take(1)
    assert source.exhausted


def test_only_overlong_prompts_end_the_run() -> None:
    with pytest.raises(
        SettingError, match=r"rollout\.max_prompt_tokens=2 is less than every one of the 5 prompts"
    ):
        make_source(5, max_prompt_tokens=2).take(1)


# Resuming


@given(first=st.integers(0, 23), more=st.integers(0, 23), peek=st.booleans())
def test_resuming_goes_on_in_the_same_order(first: int, more: int, peek: bool) -> None:
    prompts = ["a", "b" * 99, "c", "d", "e" * 99, "f"]
    whole, broken, resumed = (make_source(prompts=prompts, epochs=5) for _ in range(3))
    broken.take(first)
    if peek:
        _ = broken.exhausted
    resumed.load_state_dict(json.loads(json.dumps(broken.state_dict())))
    expected = whole.take(first + more)[first:]
    found = resumed.take(more)
    assert [(p.index, p.text) for p in found] == [(p.index, p.text) for p in expected]
    assert resumed.state_dict() == whole.state_dict() or peek
    assert resumed.exhausted == whole.exhausted


@pytest.mark.parametrize(
    "other",
    [
        {"count": 4},
        {"seed": 1},
        {"shuffle": False},
        {"max_prompt_tokens": 32},
        {"settings": SourceSettings(chat_template=False, template="{prompt} ")},
        {"prompts": ["q0", "q1", "q2", "q3", "other"]},
    ],
)
def test_the_state_of_another_data_set_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="belongs to another data set"):
        make_source(**other).load_state_dict(make_source().state_dict())


def test_more_epochs_may_be_asked_for_on_resume() -> None:
    done = make_source(epochs=1)
    done.take(5)
    resumed = make_source(epochs=2)
    resumed.load_state_dict(done.state_dict())
    assert len(resumed.take(9)) == 5


# Training and held-out sets


def write(path: Path, questions: list[str]) -> str:
    path.write_text(
        "".join(json.dumps({"prompt": q, "answer": "1"}) + "\n" for q in questions), encoding="utf-8"
    )
    return str(path)


def sources(tmp_path: Path, train: list[str], held_out: list[str], **options: Any) -> Any:
    settings = DataSettings(
        train=SourceSettings(path=write(tmp_path / "train.jsonl", train), chat_template=False),
        eval=SourceSettings(path=write(tmp_path / "eval.jsonl", held_out), template="Q {prompt}"),
        epochs=1,
    )
    return build_sources(settings, TOKENIZER, **{"max_prompt_tokens": 60, "seed": 0, **options})


def test_held_out_questions_leave_the_training_set_and_repeated_ones_the_held_out_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        train, held_out = sources(tmp_path, ["a", "b  b", "c", "c"], ["d", "b b", "d ", "e" * 99])
    assert sorted(prompt.text for prompt in train.take(9)) == ["a", "c", "c"]
    assert [prompt.text for prompt in held_out] == [
        "<bos><user>Q d<end><assistant>",
        "<bos><user>Q b b<end><assistant>",
    ]
    assert [prompt.index for prompt in held_out] == [0, 1]
    log = [record.getMessage() for record in caplog.records]
    assert "data.eval: left out 1 repeated questions of 4" in log
    assert "data.train: removed 1 held-out problems of 4" in log
    assert "data.eval: left out 1 prompts of more than 60 tokens" in log


def test_a_held_out_set_that_covers_the_training_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"holds out 3 questions, among them every one of the 2 training"):
        sources(tmp_path, ["a", "b"], ["b", "a", "c"])


def test_faults_name_the_section(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"data\.train: path and task are both empty"):
        build_sources(DataSettings(), TOKENIZER, max_prompt_tokens=9, seed=0)
    with pytest.raises(SettingError, match=r"data\.eval: rollout\.max_prompt_tokens=9 is less than"):
        sources(tmp_path, ["a"], ["b"], max_prompt_tokens=9)


def test_small_tasks_keep_the_sets_apart() -> None:
    digits = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    settings = DataSettings(
        train=SourceSettings(task="chain_sum", task_options=digits, size=300, seed=1),
        eval=SourceSettings(task="chain_sum", task_options=digits, size=64, seed=2),
        epochs=1,
    )
    train, held_out = build_sources(settings, TOKENIZER, max_prompt_tokens=200, seed=0)
    asked = [prompt.text for prompt in held_out]
    assert 30 < len(asked) == len(set(asked)) < 64
    taken = {prompt.text for prompt in train.take(300)}
    assert len(taken) > 50
    assert taken.isdisjoint(asked)
