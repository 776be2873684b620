"""What the pages name exists: files, settings, commands, make targets; examples are valid runs."""

import re
from pathlib import Path

import pytest
import yaml

from megatron_sparse_rl.cli import app
from megatron_sparse_rl.config import Config, from_tree, leaves, load_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
EXAMPLES = sorted(ROOT.glob("examples/*.yaml"))
SECTIONS = (
    "algorithm|checkpoint|data|evaluation|export|learner|observability|optimizer|parallel|reward|rollout"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    local = [target for target in targets if "://" not in target]
    missing = [target for target in local if not (page.parent / target).exists()]
    named = re.findall(r"\b(?:tests|examples|slurm|tools|docs)/[\w/]+\.\w+", text)
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_settings_exist(page: Path) -> None:
    """Every `section.key` or `section.key=value` in backticks or on a command line is a setting."""
    known = {key for key, _ in leaves(Config)}
    prefixes = {".".join(path.split(".")[:n]) for path in known for n in range(1, 6)}
    text = page.read_text(encoding="utf-8")
    named = re.findall(rf"(?<![\w./-])((?:{SECTIONS})(?:\.[a-z_0-9]+)+)(?!\.?[\w/])", text)
    if page.name == "configuration.md":  # shows a misspelt one on purpose
        named = [name for name in named if name != "optimizer.lrr"]
    assert not [name for name in named if name not in prefixes]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_and_targets_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert set(re.findall(r"megatron-sparse-rl ([a-z]+)\b", text)) <= commands
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)(?:\$ )?make ([a-z-]+)", text, re.MULTILINE)) <= targets


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid_runs(example: Path) -> None:
    load_config(example, [])


def test_yaml_on_the_pages_is_valid() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            from_tree(yaml.safe_load(block))
        for block in re.findall(r"^cat > \S+\.yaml <<'END'\n(.*?)^END", text, re.DOTALL | re.MULTILINE):
            from_tree(yaml.safe_load(block))
