"""The package as an importer gets it: light, whole, and the README's lines true."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from carope_jax.training import Experiment

ROOT = Path(__file__).parents[1]
# Not optax, which Flax itself imports.
HEAVY = ("orbax", "grain", "tensorflow_datasets", "matplotlib", "sentencepiece", "tyro")


def python(*arguments: str, executable: str = sys.executable, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [executable, *arguments],
        cwd=cwd,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def readme_example() -> str:
    return re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]


def test_importing_pulls_in_jax_and_flax_only():
    code = f"import sys, carope_jax; print([m for m in {HEAVY} if m in sys.modules])"
    assert python("-c", code).strip() == "[]"


def test_imports_point_one_way():
    """positions <- layers <- models <- evaluation, training; data stands beside; _… below."""
    allowed = {
        "positions": set(),
        "layers": {"positions"},
        "models": {"positions", "layers"},
        "data": {"_cli", "_interrupt"},
        "evaluation": set(),
        "training": {
            *("positions", "layers", "models", "data", "evaluation"),
            *("_cli", "_interrupt", "_lock"),
        },
    }
    for package, others in allowed.items():
        for path in (ROOT / "carope_jax" / package).glob("*.py"):
            found = set(re.findall(r"from carope_jax\.(\w+)", path.read_text()))
            assert found <= others | {package}, path
    for below in ("_cli", "_interrupt", "_lock"):
        found = re.findall(r"from carope_jax\.(\w+)", (ROOT / f"carope_jax/{below}.py").read_text())
        assert set(found) <= {"_interrupt"}, below


@pytest.mark.parametrize("name", ["quickstart", "smoke", "gpt2_tiny", "gpt2_small"])
def test_every_config_builds_an_experiment(name):
    found = runpy.run_path(str(ROOT / "configs" / f"{name}.py"))["experiment"]
    assert isinstance(found, Experiment)
    if name.startswith("gpt2"):
        optimizer = found.optimizer
        assert found.tokens_per_update == 524_288
        assert found.model.vocab_size == 50304
        assert (optimizer.learning_rate, optimizer.final_learning_rate) == (6e-4, 6e-5)
        assert (optimizer.warmup_steps, found.training.steps) == (750, 19_000)
        assert found.data.length == 512


def test_a_wheel_with_the_base_dependencies_runs_the_readme(tmp_path):
    """Built, installed into a fresh environment with nothing else, and the ten lines run."""
    python("-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("*.whl")
    python("-m", "venv", str(tmp_path / "venv"))
    fresh = str(tmp_path / "venv" / "bin" / "python")
    python("-m", "pip", "install", "--quiet", str(wheel), executable=fresh)
    example = tmp_path / "example.py"
    check = "assert (q2 == q3).all() and (k2 == k3).all() and carry.shape == (1, 2, 8)\n"
    example.write_text(readme_example() + check)
    python(str(example), executable=fresh, cwd=tmp_path)
    missing = f"import importlib.util as u; print([m for m in {HEAVY} if u.find_spec(m)])"
    found = python("-c", missing, executable=fresh, cwd=tmp_path)
    # Flax itself needs orbax; nothing else may come along.
    assert set(ast.literal_eval(found)) <= {"orbax"}
