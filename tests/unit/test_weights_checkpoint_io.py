"""Loading and export of Hugging Face checkpoints, whole, sharded, damaged and wrong."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_sparse_rl.learner.settings import ParallelSettings
from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.weights.architecture import read_architecture
from megatron_sparse_rl.weights.checkpoint_io import load_huggingface
from megatron_sparse_rl.weights.export import export_huggingface
from megatron_sparse_rl.weights.layouts import huggingface_layout, learner_layouts, megatron_layout
from tests.checkpoints import make_checkpoint
from tests.weight_shards import architecture, cut, empty, random_tensors

CASES = [(family, tied) for family in ("llama", "qwen2", "qwen3") for tied in (False, True)]
ARCH = architecture(layers=2)


def write(folder: Path, tensors: dict[str, torch.Tensor], files: int = 1) -> Path:
    """A checkpoint of `ARCH`, in one file or in several with an index, one after the other."""
    folder.mkdir(exist_ok=True)
    names = list(tensors)
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {name: f"part-{index * files // len(names)}.safetensors" for index, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def load_whole(folder: Path) -> dict[str, torch.Tensor]:
    tensors = empty(huggingface_layout(ARCH))
    load_huggingface(folder, ARCH, huggingface_layout(ARCH), tensors)
    return tensors


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_every_rank_loads_its_shard(family: str, tied: bool, checkpoint: Callable[..., str]) -> None:
    folder = checkpoint(family, tied=tied)
    arch = read_architecture(folder)
    whole = load_file(f"{folder}/model.safetensors")
    layouts = learner_layouts(
        arch, ParallelSettings(tensor=2, pipeline=2, sequence=False), 4, transformer_engine=False
    )
    for layout in layouts:
        tensors = empty(layout)
        load_huggingface(folder, arch, layout, tensors)
        expected = cut(layout, whole)
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_a_tied_checkpoint_may_hold_the_output_layer_too(tmp_path: Path) -> None:
    arch = architecture(tied=True)
    whole = random_tensors(arch)
    write(tmp_path, {**whole, "lm_head.weight": torch.zeros(arch.vocab, arch.hidden)})
    layout = megatron_layout(arch, 1, 0, 2, 1, transformer_engine=False)
    tensors = empty(layout)
    load_huggingface(tmp_path, arch, layout, tensors)
    assert torch.equal(tensors["output_layer.weight"][: arch.vocab], whole["model.embed_tokens.weight"])


def test_several_files_and_another_type(tmp_path: Path) -> None:
    whole = random_tensors(ARCH, dtype=torch.bfloat16)
    loaded = load_whole(write(tmp_path, whole, files=3))
    assert all(torch.equal(loaded[name], whole[name].float()) for name in whole)


def test_a_stage_opens_only_the_files_it_needs(tmp_path: Path) -> None:
    folder = write(tmp_path, random_tensors(ARCH), files=4)
    (folder / "part-3.safetensors").unlink()
    layout = megatron_layout(ARCH, 1, 0, 2, 0, transformer_engine=False)
    load_huggingface(folder, ARCH, layout, empty(layout))
    with pytest.raises(SettingError, match=r"part-3\.safetensors does not exist, though its index names it"):
        load_whole(folder)


@pytest.mark.parametrize("keep", [4, 200, -1])
def test_a_file_cut_short_is_refused(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path, random_tensors(ARCH)) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SettingError, match=r"model\.safetensors is damaged or cut short .*download"):
        load_whole(tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(SettingError, match=r"neither model\.safetensors nor"):
        load_whole(tmp_path)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    whole = random_tensors(ARCH)
    del whole[name]
    with pytest.raises(SettingError, match=f"no tensor {name}") as caught:
        load_whole(write(tmp_path, whole))
    assert ("tie_word_embeddings" in str(caught.value)) == (name == "lm_head.weight")


def test_a_tensor_missing_from_the_file_of_the_index_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, random_tensors(ARCH), files=2)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("part-1.", "part-0."))
    with pytest.raises(SettingError, match=r"part-0\.safetensors has no tensor model\.layers\.1"):
        load_whole(folder)


def test_another_shape_is_refused(tmp_path: Path) -> None:
    whole = random_tensors(ARCH)
    whole["model.layers.0.mlp.down_proj.weight"] = torch.zeros(16, 25)
    message = r"down_proj\.weight has shape \[16, 25\], config.json says \[16, 24\]"
    with pytest.raises(SettingError, match=message):
        load_whole(write(tmp_path, whole))


def test_a_quantised_tensor_is_refused(tmp_path: Path) -> None:
    whole = random_tensors(ARCH)
    whole["model.norm.weight"] = torch.ones(16, dtype=torch.int8)
    with pytest.raises(SettingError, match=r"model\.norm\.weight is stored as I8"):
        load_whole(write(tmp_path, whole))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a valid index"),
        ('{"metadata": {}}', "not a valid index"),
        ('{"weight_map": ["a"]}', "not a valid index"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "not a file of that folder"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(SettingError, match=message):
        load_whole(tmp_path)


def export(folder: str, output: Path, **options) -> dict[str, torch.Tensor]:
    """Load `folder` into a learner of one process, export it, and return the learner's tensors."""
    arch = read_architecture(folder)
    layout = megatron_layout(arch, 1, 0, 1, 0, transformer_engine=True)
    tensors = empty(layout)
    load_huggingface(folder, arch, layout, tensors)
    options = {"dtype": torch.float32, **options}
    export_huggingface(output, arch, [layout], tensors, 0, folder, **options)
    return tensors


@pytest.mark.parametrize(("family", "tied"), CASES)
@pytest.mark.parametrize("max_file_bytes", [2**30, 20_000])
def test_an_export_is_the_model_again(
    family: str, tied: bool, max_file_bytes: int, checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    folder, output = checkpoint(family, tied=tied), tmp_path / "export"
    export(folder, output, max_file_bytes=max_file_bytes)
    tokens = torch.arange(0, 150, 7)[None]
    original, again = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, output))
    assert torch.equal(original(tokens).logits, again(tokens).logits)
    assert again.get_input_embeddings().weight.shape[0] == 151
    assert again.generation_config.eos_token_id == original.generation_config.eos_token_id
    assert (
        AutoTokenizer.from_pretrained(output).get_vocab() == AutoTokenizer.from_pretrained(folder).get_vocab()
    )
    names = {name for path in output.glob("*.safetensors") for name in load_file(path)}
    assert ("lm_head.weight" in names) != tied
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_an_export_is_cut_into_files_by_size(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    export(checkpoint("llama"), tmp_path / "export", max_file_bytes=200_000)
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "export").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [path.name for path in files]
    held = {path.name: load_file(path) for path in files}
    sizes = {name: sum(t.nbytes for t in tensors.values()) for name, tensors in held.items()}
    assert all(size <= 200_000 or len(held[name]) == 1 for name, size in sizes.items())
    ordered = [sizes[path.name] for path in files]
    assert all(one + next_one > 200_000 for one, next_one in pairwise(ordered))
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert {name: file for file, tensors in held.items() for name in tensors} == index["weight_map"]


def test_an_export_says_its_type(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    export(checkpoint("llama"), tmp_path / "export", dtype=torch.bfloat16)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto").dtype == torch.bfloat16
    assert read_architecture(tmp_path / "export") == read_architecture(checkpoint("llama"))


def test_an_export_overwrites_nothing_but_its_own_leavings(
    checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "export.partial").mkdir()
    (tmp_path / "export.partial" / "model-00009-of-00009.safetensors").write_bytes(b"left by a crash")
    export(checkpoint("llama"), tmp_path / "export")
    assert not (tmp_path / "export" / "model-00009-of-00009.safetensors").exists()
    with pytest.raises(SettingError, match=r"export' exists; remove it"):
        export(checkpoint("llama"), tmp_path / "export")


def test_an_index_of_the_source_is_not_copied(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    make_checkpoint(folder, tied=False)
    whole = load_file(folder / "model.safetensors")
    write(folder, whole, files=2)
    (folder / "model.safetensors").unlink()
    export(str(folder), tmp_path / "export")
    assert not (tmp_path / "export" / "model.safetensors.index.json").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export").dtype == torch.float32
