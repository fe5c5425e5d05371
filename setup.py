"""Package metadata. Tool settings are in pyproject.toml, what CI installs in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
README = HERE / "README.md"
EXAMPLES = ("*.yaml", "*.md")


class BuildWithExamples(build_py):
    """Put the examples, which live at the top of the repository, inside the built package."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "rllib_llm", "tuned_examples")
        self.mkpath(str(target))
        for pattern in EXAMPLES:
            for file in sorted((HERE / "tuned_examples").glob(pattern)):
                self.copy_file(str(file), str(target / file.name))


setup(
    name="rllib-llm",
    version="0.1.0",
    description="Reinforcement learning from feedback for language models, on Ray RLlib",
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["rllib_llm", "rllib_llm.*"]),
    package_data={
        "rllib_llm.runs": ["page/*"],
        "rllib_llm.serving": ["page.html", "dashboard.json", "haproxy.sh"],
    },
    cmdclass={"build_py": BuildWithExamples},
    install_requires=[
        "ray[rllib]>=2.60,<2.61",
        "torch>=2.6",
        "transformers>=5",
        "gymnasium>=1.2",
        "jsonschema>=4.26",
        "numpy>=1.26",
        "packaging>=24",
        "safetensors>=0.5",
        "tokenizers>=0.21",
        "accelerate>=1.0",
        "datasets>=3",
        "pyarrow>=17",
        "peft>=0.15",
        "bitsandbytes>=0.50",
        "torchao>=0.13",
        "wandb>=0.19",
        "psutil>=5.9",
        "pydantic>=2.5,<3",
        "pyyaml>=6",
        "rich>=13",
        "typer>=0.15",
    ],
    extras_require={
        "openai": ["httpx>=0.27"],
        "serve": ["ray[serve]>=2.60,<2.61", "llguidance>=1.9", "httpx>=0.27"],
        # Tasks, verifiers and tools that others have written.
        "environments": ["reasoning-gym>=0.1.25", "math-verify>=0.9", "mcp>=2"],
        # In an environment of its own: verifiers pins openai below 3.
        "verifiers": ["verifiers>=0.4,<0.5", "renderers>=0.1.12"],
        "renderers": ['renderers>=0.1.12; python_version >= "3.11"'],
        "rollouts": ["duckdb>=1.4"],
        "nixl": ["nixl>=1.0"],
        # On CUDA. On a CPU: `.ci/vllm`.
        "vllm": ["vllm>=0.32"],
        "docs": ["zensical>=0.0.60", "pymdown-extensions>=10"],
        "dev": [
            "duckdb>=1.4",
            "httpx>=0.27",
            "hypothesis>=6.100",
            "ipykernel>=6.29",
            "llguidance>=1.9",
            "math-verify>=0.9",
            "matplotlib>=3.8",
            "mcp>=2",
            "flask>=3",
            "flask-cors>=6",
            "moto>=5.2",
            "mypy>=1.13",
            "nbclient>=0.10",
            "openai>=3",
            "pandas>=2.2",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ray[serve]>=2.60,<2.61",
            "reasoning-gym>=0.1.25",
            'renderers>=0.1.12; python_version >= "3.11"',
            "ruff>=0.9",
            'schemathesis>=4.32; python_version >= "3.11"',
        ],
    },
    entry_points={
        "console_scripts": [
            "rllib = rllib_llm.cli.main:app",
            "rllib-llm = rllib_llm.cli.main:app",
        ]
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
