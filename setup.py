"""Package list of the wheel; pyproject.toml cannot combine discovery with the mapped folder assets/."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["specdemo", "specdemo.*"]), "specdemo.assets"],
    package_dir={"specdemo.assets": "assets"},
)
