"""What pyproject.toml cannot say: which package each folder beside `repro/` is installed as."""

from setuptools import find_namespace_packages, setup

OUTSIDE = {
    "kernels": "repro.kernels",
    "examples": "repro.examples",
    "suites": "repro.config.suites.files",
    "slurm": "repro.config.suites.profiles",
}

setup(
    packages=[
        *find_namespace_packages(include=["repro", "repro.*"], exclude=["*.__pycache__"]),
        *(
            f"{package}{name and '.'}{name}"
            for folder, package in OUTSIDE.items()
            for name in ("", *find_namespace_packages(folder, exclude=["*__pycache__"]))
        ),
    ],
    package_dir={package: folder for folder, package in OUTSIDE.items()},
)
