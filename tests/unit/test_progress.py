"""The progress bar of a rollout: there on a terminal, silent elsewhere, gone afterwards."""

import io

import pytest

from megatron_sparse_rl.observability.progress import RolloutProgress, showing_bytes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_answers_and_tokens():
    stream = Terminal()
    progress = RolloutProgress(enabled=True, stream=stream)
    with progress.showing("step 3: sampling", 96):
        progress(1234, 41)
    shown = stream.getvalue()
    assert "step 3: sampling" in shown
    assert "41/96" in shown
    assert "1234 tokens" in shown


@pytest.mark.parametrize(("enabled", "stream"), [(True, io.StringIO()), (False, Terminal())])
def test_nothing_is_written_off_a_terminal_or_when_turned_off(enabled, stream):
    progress = RolloutProgress(enabled=enabled, stream=stream)
    with progress.showing("evaluating", 4):
        progress(10, 2)
    assert stream.getvalue() == ""


def test_the_bar_ends_with_the_block_even_when_it_raises():
    stream = Terminal()
    progress = RolloutProgress(enabled=True, stream=stream)
    with pytest.raises(RuntimeError, match="engine"), progress.showing("sampling", 4):
        raise RuntimeError("engine")
    written = len(stream.getvalue())
    progress(10, 2)
    assert len(stream.getvalue()) == written


@pytest.mark.parametrize(("stream", "shown"), [(Terminal(), "2.0/8.0 KiB"), (io.StringIO(), "")])
def test_bytes_are_shown_on_a_terminal_only(stream, shown):
    with showing_bytes("reading", 8192, stream=stream) as advance:
        advance(1024)
        advance(1024)
    assert shown in stream.getvalue()
    assert bool(stream.getvalue()) == bool(shown)
