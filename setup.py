"""Package list of the wheel; pyproject.toml cannot combine discovery with the mapped folders assets/ and docs/."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["specdemo", "specdemo.*"]), "specdemo.assets", "specdemo.docs"],
    package_dir={"specdemo.assets": "assets", "specdemo.docs": "docs"},
)
