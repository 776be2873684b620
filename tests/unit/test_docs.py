"""What the pages name exists: files, settings, commands, make targets; examples are valid runs."""

import re
from pathlib import Path

import pytest
import typer
import yaml

from megatron_sparse_rl.cli import app
from megatron_sparse_rl.config import Config, from_tree, leaves, load_config
from megatron_sparse_rl.placement import check_layout
from megatron_sparse_rl.weights.architecture import Architecture
from megatron_sparse_rl.weights.layouts import check_layouts

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
EXAMPLES = sorted(ROOT.glob("examples/*.yaml"))
NODE = 8  # GPUs


def shapes(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> Architecture:
    """As the model's config.json says; what the layouts do not depend on is left at any value."""
    return Architecture(
        family="qwen2",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=vocab,
        tied=False,
        qkv_bias=True,
        qk_norm=False,
        norm_eps=1e-6,
        max_positions=32768,
        rope_theta=1e6,
    )


SHAPES = {
    "smollm2-135m": shapes(30, 576, 9, 3, 1536, 49152),
    "Qwen2.5-1.5B-Instruct": shapes(28, 1536, 12, 2, 8960, 151936),
    "Qwen2.5-7B-Instruct": shapes(28, 3584, 28, 4, 18944, 152064),
}
SECTIONS = "algorithm|checkpoint|data|evaluation|learner|observability|optimizer|parallel|reward|rollout"


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
def test_sections_that_links_lead_to_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")):
        text = (page.parent / target if target else page).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert anchor in anchors, f"{target}#{anchor}"


def test_tests_that_pages_name_exist() -> None:
    """Also where only the name of the file is given, or a pattern."""
    for page in PAGES:
        for name in re.findall(r"\btest_[\w*]+\.py", page.read_text(encoding="utf-8")):
            assert list(ROOT.glob(f"tests/*/{name}")), f"{page.name} names {name}"


def test_the_readme_leads_to_every_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [page.name for page in ROOT.glob("docs/*.md") if f"(docs/{page.name})" not in text]


def test_code_blocks_are_closed() -> None:
    for page in PAGES:
        fences = re.findall(r"^```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) % 2 == 0, page.name
        assert not any(fences[1::2]), page.name


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
    config = load_config(example, [])
    check_layouts(SHAPES[Path(config.model).name], config.parallel, config.rollout.tensor)
    check_layout(config, NODE if config.device == "cuda" else 1)


def test_commands_on_the_pages_start_examples_with_valid_overrides() -> None:
    """`... examples/x.yaml key=value ...` on a command line, continued or not."""
    found = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for example, rest in re.findall(r"(?:train|eval|sbatch) (examples/\w+\.yaml)([^\n#]*)", text):
            load_config(ROOT / example, [word for word in rest.split() if "=" in word])
            found += 1
    assert found >= 4


def test_options_of_the_command_exist() -> None:
    known = {"--help"}
    for command in typer.main.get_command(app).commands.values():  # type: ignore[attr-defined]
        known |= {option for parameter in command.params for option in parameter.opts}
    for page in PAGES:
        for line in re.findall(r"megatron-sparse-rl (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert set(re.findall(r"(?<!\w)--[a-z-]+", line)) <= known, f"{page.name}: {line}"


def test_yaml_on_the_pages_is_valid() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            from_tree(yaml.safe_load(block))
        for block in re.findall(r"^cat > \S+\.yaml <<'END'\n(.*?)^END", text, re.DOTALL | re.MULTILINE):
            from_tree(yaml.safe_load(block))
