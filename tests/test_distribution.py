"""What `make dist` builds has all that commands read, and runs where there is no source tree."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ABOUT_INSTALLATION = """
import tide_lm
from tide_lm.run import optional
print(tide_lm.__file__)
print(optional.install("serve"))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    pytest.importorskip("hatchling", reason="hatchling is missing: make setup")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, check=True)
    return folder


def in_package(names):
    """Return names within the package, whatever folder of an archive it is in."""
    return {name.partition("tide_lm/")[2] for name in names if "tide_lm/" in name} - {""}


def test_wheel_and_sdist_have_each_file_of_the_package_and_no_other(built):
    package = ROOT / "src" / "tide_lm"
    files = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    wanted = {name for name in files if "__pycache__" not in name}
    assert wanted > {"data/stories.jsonl.xz", "report/page.html.jinja", "explore/page.js"}
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert in_package(zipfile.ZipFile(wheel).namelist()) == wanted
    with tarfile.open(sdist) as archive:
        names = [member.name for member in archive if member.isfile()]
    assert in_package(name for name in names if "/src/" in name) == wanted
    assert {f"{sdist.name.removesuffix('.tar.gz')}/{name}" for name in ("pyproject.toml", "LICENSE")} < {
        *names
    }


@pytest.mark.slow
def test_the_wheel_runs_the_demos_first_step_in_an_environment_of_its_own(built, tmp_path):
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, wheel], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    # The requirements, and not the source tree: links to it in this folder are not followed.
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words):
        done = subprocess.run(
            words, cwd=tmp_path, env=alone, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    found, install = run(python, "-c", ABOUT_INSTALLATION).splitlines()
    assert Path(found).is_relative_to(environment)
    assert install == f"pip install 'tide-lm[serve] @ {wheel.as_uri()}'"
    step = "from pathlib import Path; from tide_lm.cli import demo; print(demo._prepare(Path('data')))"
    assert int(run(python, "-c", step)) > 1e6
    assert (tmp_path / "data" / "manifest.json").exists()
    assert "usage" in run(environment / "bin" / "tide-lm", "demo", "--help").lower()
