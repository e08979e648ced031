"""The package memplan and what it needs. Settings of its tools are in pyproject.toml."""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

# The libraries that libmxnet.so of mxnet-cu112 loads; libcuda.so.1 comes with the driver.
CUDA_LIBRARIES = [
    "nvidia-cublas-cu11",
    "nvidia-cuda-nvrtc-cu11",
    "nvidia-cuda-runtime-cu11",
    "nvidia-cudnn-cu11>=8.5,<9",
    "nvidia-cufft-cu11",
    "nvidia-curand-cu11",
    "nvidia-cusolver-cu11",
    "nvidia-nccl-cu11",
    "nvidia-nvtx-cu11",
]
DASK = "distributed>=2024.1,<2027"


class BuildAndCompile(build_py):
    """Builds the package and compiles its search into it, so that no first plan has to.

    The first plan does where this fails, and with another processor or numba than were here.
    """

    def run(self) -> None:
        super().run()
        folder = Path("." if self.editable_mode else self.build_lib).resolve()
        environment = {name: os.environ[name] for name in os.environ if name != "NUMBA_CACHE_DIR"}
        command = [sys.executable, "-B", "-m", "memplan.search.compile"]
        try:
            subprocess.run(command, cwd=folder, env=environment, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"memplan is built without its search compiled: {error}", file=sys.stderr)


setup(
    name="memplan",
    version="0.1.0",
    description="Plans the activation memory of MXNet 1.9.1 training by recomputation",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    cmdclass={"build_py": BuildAndCompile},
    packages=find_packages(include=["memplan", "memplan.*"]),
    package_data={"memplan": ["py.typed"], "memplan.views": ["page/*"]},
    # MXNet 1.9.1 needs distutils (gone in 3.12) and breaks at import with numpy 1.24;
    # python-mip 2 needs Python 3.10.
    python_requires=">=3.10,<3.12",
    install_requires=[
        "numpy>=1.23.2,<1.24",
        "networkx>=3.0,<4",
        "mip[highs]>=2,<3",
        # highspy 1.16 hides the functions in C that python-mip calls.
        "highspy>=1.9,<1.16",
        "numba>=0.59,<1",
        # The command line.
        "click>=8.1,<9",
        # Tables: of the command line, and in what plans and comparisons show of themselves.
        "rich>=13,<15",
    ],
    entry_points={"console_scripts": ["memplan = memplan.cli.start:main"]},
    extras_require={
        "cpu": ["mxnet==1.9.1"],
        "cu112": ["mxnet-cu112==1.9.1", *CUDA_LIBRARIES],
        "plot": ["matplotlib>=3.7,<3.11"],
        "dask": [DASK],
        # What the tests in tests/scripts train. GluonCV 0.10.5.post0 asks for packages that do not
        # stand beside MXNet's numpy: the Makefile installs it without, and these are what it uses.
        "scripts": [
            "gluonnlp==0.10.0",
            "autocfg<1",
            "Pillow>=9,<13",
            "portalocker>=2,<4",
            "pyyaml>=6,<7",
            "requests>=2.28,<3",
            "scipy>=1.10,<1.16",
            "tqdm>=4.60,<5",
            "yacs<1",
        ],
        "docs": ["sphinx>=8.1,<8.2", "myst-parser>=4,<5", "sphinx-click>=6,<7"],
        "test": [
            DASK,
            "hypothesis>=6.100,<7",
            "mypy>=2.4,<2.5",
            "pytest>=9,<10",
            "pytest-xdist>=3.6,<4",
            "ruff>=0.17,<0.18",
        ],
    },
)
