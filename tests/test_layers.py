"""Imports go one way: this table is the law, the walk below enforces it."""

import ast
import subprocess
import sys
from pathlib import Path

import harts

ROOT = Path(harts.__file__).parent

# A package may import itself and what stands in an earlier line; names in one line do not import each other.
ORDER = [
    {"trajectory", "files", "transfer", "escapes"},
    {"tree", "formats", "vocabulary"},
    {"chains"},
    {"blocks"},
    {"cost"},
    {"layout", "flops", "plan", "explain"},
    {"ops", "slots"},
    {"mixers"},
    {"models", "losses"},
    {"train"},
    {"testing"},
    {"integrations", "viz"},
    {"cli"},
]
WITHOUT_TORCH = [
    "trajectory",
    "vocabulary",
    "files",
    "tree",
    "chains",
    "blocks",
    "cost",
    "flops",
    "plan",
    "formats",
    "explain",
]


def imported_packages(path: Path) -> set[str]:
    """Second part of every `harts.x` name that a file imports, at any level."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "harts":
            assert node.level == 0
            found |= {node.module.split(".")[1]} if "." in node.module else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("harts.")}
    return found


def test_imports_go_one_way() -> None:
    level = {name: index for index, names in enumerate(ORDER) for name in names}
    for path in sorted(ROOT.rglob("*.py")):
        package = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if package == "__init__":
            continue
        assert package in level, f"{path.name}: add the package {package} to the table"
        for other in imported_packages(path) - {package}:
            assert level.get(other, 99) < level[package], f"{path.relative_to(ROOT)} imports harts.{other}"


def test_reading_and_planning_need_no_torch() -> None:
    names = [name for name in WITHOUT_TORCH if (ROOT / name).exists() or (ROOT / f"{name}.py").exists()]
    code = ";".join(f"import harts.{name}" for name in names) + ";import sys;sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ops_know_no_process_groups() -> None:
    for path in sorted((ROOT / "ops").rglob("*.py")):
        assert "torch.distributed" not in path.read_text(encoding="utf-8"), path


def test_files_and_functions_stay_small() -> None:
    for path in sorted(ROOT.rglob("*.py")):
        kernel = path.name == "triton.py" or "@triton.jit" in path.read_text(encoding="utf-8")
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= (700 if kernel else 400), path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                assert size <= (150 if kernel else 60), f"{path}:{node.lineno} {node.name} has {size} lines"
