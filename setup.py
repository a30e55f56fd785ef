"""The package. Exact versions that are tested together stand in requirements.txt."""

from setuptools import setup

setup(
    name="dapo-async",
    version="0.1.0",
    description="Asynchronous reinforcement learning of language models with DAPO",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[
        "dapo_async",
        "dapo_async.launch",
        "dapo_async.preflight",
        "dapo_async.rewards",
        "dapo_async.studies",
        "dapo_async.studies.ablation",
        "actors",
        "learner",
    ],
    package_data={
        "dapo_async.studies": ["*.html.jinja", "report.css"],
        "actors": ["sglang_cpu/*.py"],  # a folder for the path of a process, no package
    },
    install_requires=[
        "aiohttp>=3.10",
        "deepspeed>=0.19",
        "jinja2>=3.1",
        "math-verify>=0.9",
        "matplotlib>=3.9",
        "msgpack>=1.1",
        "numpy>=2.0",
        "packaging>=24.0",
        "pyarrow>=17",
        "pydantic>=2.9",
        "pyyaml>=6.0",
        "ray>=2.50",
        "rich>=13.7",
        "safetensors>=0.5",
        "tenacity>=9.0",
        "tensorboard>=2.18",
        "torch>=2.8",
        "transformers>=5.0",
        "xxhash>=3.0",
    ],
    # For GPUs. On a CPU: pip install --no-deps -r requirements-sglang-cpu.txt
    extras_require={"sglang": ["sglang==0.5.23"]},
    entry_points={"console_scripts": ["dapo-async = dapo_async.cli:main"]},
)
