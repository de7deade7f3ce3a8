"""What pyproject.toml cannot say: the packages under `kernels/` are installed as `repro.kernels`."""

from setuptools import find_namespace_packages, setup

setup(
    packages=[
        *find_namespace_packages(include=["repro", "repro.*"], exclude=["*.__pycache__"]),
        "repro.kernels",
        *(f"repro.kernels.{name}" for name in find_namespace_packages("kernels", exclude=["*__pycache__"])),
    ],
    package_dir={"repro.kernels": "kernels"},
)
