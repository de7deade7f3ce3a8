"""What pyproject.toml cannot say: `kernels/` and `examples/` are installed as `repro.kernels` and `repro.examples`."""

from setuptools import find_namespace_packages, setup

OUTSIDE = ("kernels", "examples")

setup(
    packages=[
        *find_namespace_packages(include=["repro", "repro.*"], exclude=["*.__pycache__"]),
        *(
            f"repro.{folder}{name and '.'}{name}"
            for folder in OUTSIDE
            for name in ("", *find_namespace_packages(folder, exclude=["*__pycache__"]))
        ),
    ],
    package_dir={f"repro.{folder}": folder for folder in OUTSIDE},
)
