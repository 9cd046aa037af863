"""The rules of the house: which way imports run, what is light, and how long a file may be."""

from __future__ import annotations

import ast
import fnmatch
import functools
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import house_counts
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("workloads", "orchestrator", "cluster")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
FORBIDDEN = {
    "workloads": {"orchestrator", "cluster", "ray", "deepspeed", "mlflow"},
    "cluster": {"orchestrator", "workloads", "mlflow", "transformers"},
    "orchestrator": {"tests"},
}
"""What each package may not import, at the top of a module or within a function."""
ROOMS = {
    "orchestrator": [
        *(
            "config",
            "storage",
            "checkpoint",
            "data",
            "parallel",
            "planner",
            "models",
            "resolve",
            "optim",
            "prune",
            "quantize",
            "rewards",
            "train",
        ),
        *("planner.trace", "observe", "export", "evaluate", "bench"),
        *("controller", "launch", "chain", "tune", "verify", "api", "cli", "extensions"),
    ],
    "cluster": ["workers", "local", "remote", "jobs"],
    "workloads": [
        *(
            "errors",
            "record_format",
            "predicted",
            "model",
            "adapters",
            "own.object_reference",
            "objectives",
            "plain_module",
        ),
        *("hf.tables", "hf.files", "own"),
        *(
            "hf.as_they_are",
            "hf.convert",
            "transformer_workload",
            "describe",
            "load",
            "parameter_shares",
            "inference",
            "hf.check",
            "hf.export",
        ),
        "trial",
    ],
}
"""The packages within each, from the bottom up: a package imports only those below it. `planner.trace` runs the
engine's own step, and so stands above it. In `workloads`, a module beside the packages has its place among them,
but for `workload`: the protocol, which all know."""
LIGHT = {
    "orchestrator": ("torch", "ray", "transformers", "mlflow", "numpy", "pydantic", "pandas"),
    "orchestrator.parallel.layout": ("torch", "ray", "transformers", "mlflow", "numpy", "pydantic"),
    "orchestrator.checkpoint.sidecar": ("torch", "ray", "transformers", "mlflow", "numpy", "pydantic"),
    "orchestrator.bench.worker": ("torch", "ray", "transformers", "mlflow", "pydantic", "pandas"),
    "orchestrator.rewards.worker": ("torch", "ray", "transformers", "mlflow", "numpy", "pydantic"),
    "orchestrator.rewards.scorer": ("torch", "ray", "transformers", "mlflow", "numpy"),
    "orchestrator.config.spec": ("torch", "ray", "transformers", "mlflow", "numpy"),
    "orchestrator.api.start": ("torch", "ray", "transformers", "mlflow", "pandas"),
    "orchestrator.tune.space": ("torch", "ray", "transformers", "mlflow", "optuna"),
    "orchestrator.tune.rung_steps": ("torch", "ray", "transformers", "mlflow", "optuna"),
    "orchestrator.controller.decide": ("torch", "ray", "transformers", "mlflow"),
    "orchestrator.planner.choose_layout": ("torch", "ray", "transformers", "mlflow"),
    "orchestrator.storage.run_directory": ("torch", "ray", "transformers", "mlflow"),
    "orchestrator.train.task": ("torch", "ray", "transformers", "mlflow"),
    "orchestrator.checkpoint.commit_store": ("torch", "ray", "transformers", "mlflow"),
    "orchestrator.data.prepare.records": ("torch", "ray", "transformers", "mlflow"),
    "workloads.hf.files.weight_names": ("torch", "ray", "transformers", "mlflow"),
    "orchestrator.models.base": ("torch", "ray", "transformers", "mlflow"),
    "orchestrator.chain.results": ("torch", "ray", "transformers", "mlflow"),
    "cluster.workers.gang": ("torch", "ray"),
    "cluster.workers.worker_context": ("torch", "ray"),
    "cluster.workers.rank_process": ("torch", "ray"),
    "cluster.workers.heartbeat": ("torch", "ray"),
    "cluster.workers.fork_server": ("torch", "ray"),
    "cluster.workers.process_gang": ("torch", "ray"),
    "orchestrator.controller.controller": ("torch", "ray", "transformers"),
    "workloads.load": ("ray", "transformers", "torch._dynamo"),
    "orchestrator.chain.drive": ("ray", "mlflow"),
    "orchestrator.train.loop": ("ray", "transformers", "mlflow"),
}
"""Modules that decide, or that run in every process, and what importing them may not bring with it; in an order in
which none brings what a later one may not."""
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
UNSAFE_CALLS = {
    ("torch", "load"),
    ("numpy", "load"),
    ("np", "load"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
}
UNPICKLES = (
    "orchestrator/extensions/importers/deepspeed_unpickle.py",
    "orchestrator/extensions/importers/megatron_unpickle.py",
)
PLAIN = "workloads/hf/files/plain_pickle.py"
OBJECT_COLLECTIVES = {
    ("all_gather_object",),
    ("broadcast_object_list",),
    ("gather_object",),
    ("scatter_object_list",),
}


def test_every_file_beside_the_code_is_in_the_wheel() -> None:
    """Templates and profiles are read at run time; a wheel has only what pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = project["tool"]["setuptools"]["package-data"]
    beside = {
        path.relative_to(ROOT / package).as_posix(): package
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    left_out = [
        f"{package}/{path}"
        for path, package in beside.items()
        if not any(fnmatch.fnmatch(path, pattern) for pattern in named.get(package, ()))
    ]
    assert left_out == []


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


def dotted(node: ast.expr) -> tuple[str, ...]:
    """The names of `a.b.c`."""
    if isinstance(node, ast.Attribute):
        return (*dotted(node.value), node.attr)
    return (node.id,) if isinstance(node, ast.Name) else ()


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 80
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] == package
        for module in imported(parsed(path))
        if module.split(".")[0] in FORBIDDEN[package]
    ]
    assert wrong == []


READS_IT_OPEN = {
    "orchestrator/resolve/precision.py",
    "orchestrator/tune/preflight.py",
}
"""Beside the room `job`, what may see that a job leaves its precision open. All others read `train.dtype`, which raises
where nobody has chosen one."""


def test_no_room_below_sees_a_precision_that_is_not_chosen() -> None:
    found = {
        name_of(path)
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and dotted(node)[-2:] == ("train", "precision")
    }
    assert {name for name in found if not name.startswith("orchestrator/config/")} == READS_IT_OPEN


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES
}


@functools.cache
def imports_of(module: str) -> frozenset[str]:
    """The modules of this project that a module imports, at its top or within a function."""
    found = set()
    for node in ast.walk(parsed(MODULES[module])):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            below = {f"{node.module}.{name.name}" for name in node.names}
            # `from package import module` needs the module, `from module import name` the module itself.
            found |= below & MODULES.keys() or {node.module or ""}
    return frozenset((found & MODULES.keys()) - {module})


def texts(tree: ast.AST) -> Iterator[str]:
    """Every string of a file that is no docstring."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def modules_in(text: str) -> set[str]:
    """The modules of this project that a string names, such as `module:function`, or imports, as code does."""
    packages = "|".join(PACKAGES)
    found = set(re.findall(rf"import(?:_module\(|\s)\W*({packages})\b", text))
    for name in re.findall(rf"\b(?:{packages})(?:\.\w+)+", text):
        while "." in name and name not in MODULES:
            name = name.rpartition(".")[0]
        found |= {name} if "." in name else set()
    return found


def test_which_modules_a_string_names() -> None:
    assert modules_in("orchestrator.train.loop:main") == {"orchestrator.train.loop"}
    assert modules_in("a orchestrator.observe.sinks.sink.Sink has") == {"orchestrator.observe.sinks.sink"}
    assert modules_in("import sys; importlib.import_module('orchestrator')") == {"orchestrator"}
    assert modules_in("import orchestrator") == {"orchestrator"}
    assert modules_in("orchestrator.run_dir") == set(), "a key of a job's metadata"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_string_names_a_module_of_a_package_above(package: str) -> None:
    wrong = [
        f"{name_of(path)} names {module}"
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] == package
        for text in texts(parsed(path))
        for module in modules_in(text)
        if module.split(".")[0] in FORBIDDEN[package]
    ]
    assert wrong == []


def room_of(module: str, package: str) -> str:
    """The highest of the known rooms that holds a module, by where its file stands; empty for none."""
    rooms = (f"{package}.{room}" for room in ROOMS[package])
    return max((room for room in rooms if f"{module}.".startswith(f"{room}.")), key=len, default="")


@pytest.mark.parametrize("package", ["orchestrator", "cluster"])
def test_no_string_names_a_module_of_a_room_above(package: str) -> None:
    height = {"": -1} | {f"{package}.{room}": number for number, room in enumerate(ROOMS[package])}
    wrong = [
        f"{module} names {other}"
        for module, path in MODULES.items()
        if room_of(module, package)
        for text in texts(parsed(path))
        for other in modules_in(text)
        if height[room_of(other, package)] > height[room_of(module, package)]
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ROOMS)
def test_every_module_is_in_a_package_that_is_known(package: str) -> None:
    folders = {path.name for path in (ROOT / package).iterdir() if (path / "__init__.py").exists()}
    beside = {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__", "__main__"}
    beside -= {"workload"}
    assert folders | beside == {room.partition(".")[0] for room in ROOMS[package]}
    assert package == "workloads" or not beside
    in_no_room = [
        module for module in MODULES if module.startswith(f"{package}.hf.") and not room_of(module, package)
    ]
    assert in_no_room == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_those_below_it(package: str) -> None:
    height = {f"{package}.{room}": number for number, room in enumerate(ROOMS[package])}
    rooms = {module: room_of(module, package) for module in MODULES if module.startswith(f"{package}.")}
    # What a component says in the job file stands with the component, and belongs to `config`, which composes it.
    if package == "orchestrator":
        rooms |= {
            module: f"{package}.config"
            for module in rooms
            if module.rpartition(".")[2] in ("config", "kinds")
        }
    upward = [
        f"{module} imports {other}"
        for module, room in rooms.items()
        for other in imports_of(module)
        if other in rooms and room in height and height.get(rooms[other], -1) > height[room]
    ]
    assert upward == []


def test_every_module_that_is_imported_is_there() -> None:
    """Within a function too, where nobody would notice before it is called."""
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in SOURCES
        for module in imported(parsed(path))
        if module.split(".")[0] in PACKAGES and module not in MODULES
    ]
    assert wrong == []


def test_no_imports_run_in_a_circle() -> None:
    """Leaf after leaf is taken away; what is left is a circle."""
    left = {module: imports_of(module) for module in MODULES}
    while leaves := [module for module, others in left.items() if not others & left.keys()]:
        for module in leaves:
            del left[module]
    assert sorted(left) == []


def extension_of(module: str) -> str:
    """The folder of `orchestrator/extensions` that a module is in; empty for none, and for the package itself."""
    found = re.match(r"orchestrator\.extensions\.(\w+)", module)
    return found[1] if found else ""


def test_nothing_imports_an_extension_but_itself() -> None:
    """The core finds them by their entry points, as it finds a stranger's."""
    wrong = [
        f"{module} names {other}"
        for module, path in MODULES.items()
        for other in (
            *imports_of(module),
            *(name for text in texts(parsed(path)) for name in modules_in(text)),
        )
        if extension_of(other) and extension_of(other) != extension_of(module)
    ]
    assert wrong == []


def test_each_extension_is_an_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    values = [value for group in project["entry-points"].values() for value in group.values()]
    folders = {path.name for path in (ROOT / "orchestrator" / "extensions").iterdir() if path.is_dir()}
    assert {extension_of(value) for value in values} == folders - {"__pycache__"}
    for value in values:
        module, _, name = value.partition(" [")[0].partition(":")
        assert name in {
            target.id
            for node in parsed(MODULES[module]).body
            for target in (node.targets if isinstance(node, ast.Assign) else ())
            if isinstance(target, ast.Name)
        } | {
            node.name
            for node in parsed(MODULES[module]).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }


def brought(modules: Sequence[str]) -> dict[str, list[str]]:
    """What was imported, of what a module may not bring, by the time that it was: one after the other in a process."""
    code = "import importlib, json, sys\nfound = {}\nfor module, heavy in json.loads(sys.argv[1]).items():\n"
    code += "    importlib.import_module(module)\n    found[module] = sorted({*heavy} & {*sys.modules})\n"
    asked = json.dumps({module: LIGHT[module] for module in modules})
    command = [sys.executable, "-c", f"{code}print(json.dumps(found))", asked]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def brought_together() -> dict[str, list[str]]:
    return brought([*LIGHT])


@pytest.mark.parametrize("module", LIGHT)
def test_what_decides_is_light(brought_together: dict[str, list[str]], module: str) -> None:
    """One that seems heavy after others is looked at alone."""
    assert not brought_together[module] or brought([module]) == {module: []}


def test_no_folder_of_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    """pytest's own list of folders that it does not enter has `dist`."""
    passed_over = [
        str(folder.relative_to(ROOT))
        for folder in (ROOT / "tests").rglob("*")
        if list(folder.glob("test_*.py"))
        and any(fnmatch.fnmatch(folder.name, pattern) for pattern in pytestconfig.getini("norecursedirs"))
    ]
    assert passed_over == []


def test_the_package_needs_nothing_of_the_tests() -> None:
    own = {path.stem for path in (ROOT / "tests").glob("*.py")} | {"conftest", "tests"}
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in SOURCES
        for module in imported(parsed(path))
        if module.split(".")[0] in own
    ]
    assert wrong == []


def test_nothing_is_unpickled() -> None:
    """What is loaded is JSON, YAML by its safe loader, or safetensors."""
    wrong = []
    for path in SOURCES:
        tree = parsed(path)
        wrong += [f"{name_of(path)} imports {m}" for m in imported(tree) if m.split(".")[0] in UNSAFE_MODULES]
        for node in ast.walk(tree):
            words = dotted(node.func) if isinstance(node, ast.Call) else ()
            if words[-2:] in UNSAFE_CALLS or words[-1:] in OBJECT_COLLECTIVES:
                wrong.append(f"{name_of(path)}:{node.lineno} calls {'.'.join(words)}")
    # The commands that read another project's pickles do so in a process of its own, which runs one of these files.
    # One module reads metadata that torch pickles, and makes nothing of it but plain records: tests try it.
    known = (*(f"{path}:" for path in UNPICKLES), f"{PLAIN} imports pickle")
    assert [line for line in wrong if not line.startswith(known)] == []
    unpicklers = [
        node for node in ast.walk(parsed(ROOT / PLAIN)) if isinstance(node, ast.ClassDef) and node.bases
    ]
    assert len(unpicklers) == 2
    assert all(
        "find_class" in {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
        for node in unpicklers
    )
    modules = {path.removesuffix(".py").replace("/", ".") for path in UNPICKLES}
    assert [name_of(path) for path in SOURCES if modules & set(imported(parsed(path)))] == []


def test_private_parts_of_ray_are_used_in_one_module_only() -> None:
    wrong = [name_of(path) for path in SOURCES if "ray._private" in path.read_text()]
    assert wrong == ["cluster/workers/ray_internals.py"]


def test_no_state_is_global() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Global)
    ]
    assert wrong == []


def test_every_module_and_public_name_says_what_it_is() -> None:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    wrong = []
    for path in SOURCES:
        tree = parsed(path)
        if tree.body and not ast.get_docstring(tree):
            wrong.append(name_of(path))
        for node in tree.body:
            if isinstance(node, kinds) and not node.name.startswith("_") and not ast.get_docstring(node):
                wrong.append(f"{name_of(path)}: {node.name}")
    assert wrong == []


def test_inheritance_is_one_deep() -> None:
    """A class of ours inherits from a library's, or from one of ours that inherits from no other of ours."""
    bases = {}
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {dotted(base)[-1] for base in node.bases if dotted(base)}
    deep = {
        f"{name} < {base} < {grand}"
        for name, found in bases.items()
        for base in found & bases.keys()
        for grand in bases[base] & bases.keys()
    }
    assert deep == set()


def test_the_whole_job_is_given_to_no_more_functions() -> None:
    """The numbers may fall. Whoever raises one gives a function a part of the job instead, or names an argument."""
    found = house_counts.counts()
    assert found["functions that take the whole job"] <= 60
    assert found["functions that take the resolved job"] <= 33
    assert found["calls with more than five positional arguments"] == 0
    assert found["isinstance tests of kinds of models"] == 0
    assert found["modules with more than 25 imports"] == 0
    assert found["files that name the optimizer lion"] == 1
    assert found["files that name the sink wandb"] == 2
