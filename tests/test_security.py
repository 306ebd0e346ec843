"""Nothing that is read becomes code: no pickle, no eval, no shell, no unsafe YAML."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "moe_rl"
MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {"os.system", "os.popen", "torch.load", "torch.save", "yaml.unsafe_load", "yaml.full_load", "pd.read_pickle"}


def unsafe(tree):
    """Yield the line and name of everything in a module that can turn data into code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from ((node.lineno, name) for name in names if name.split(".")[0] in MODULES)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            shell = any(key.arg == "shell" and ast.unparse(key.value) != "False" for key in node.keywords)
            pickled = any(key.arg == "allow_pickle" and ast.unparse(key.value) != "False" for key in node.keywords)
            plain = any(key.arg == "weights_only" and ast.unparse(key.value) == "True" for key in node.keywords)
            if (name in BUILTINS | CALLS and not (name == "torch.load" and plain)) or shell or pickled:
                yield node.lineno, name
            if name == "yaml.load" and ast.unparse(node.args[1]) != "_Loader":
                yield node.lineno, name


def test_the_package_makes_no_code_of_data():
    found = [(path.name, *what) for path in PACKAGE.rglob("*.py") for what in unsafe(ast.parse(path.read_text()))]
    assert found == []


def test_the_check_sees_what_it_looks_for():
    bad = (
        "import pickle|from dill import loads|eval('1')|torch.load('x')|yaml.load(x, yaml.Loader)|run('x', shell=True)"
    )
    for code in bad.split("|"):
        assert len(list(unsafe(ast.parse(code)))) == 1, code
    assert not list(unsafe(ast.parse("torch.load(path, weights_only=True)")))
    assert not list(unsafe(ast.parse("model.eval()\nre.compile('x')\nyaml.load(text, _Loader)")))


def test_the_yaml_loader_is_a_safe_one():
    import yaml

    from moe_rl import yaml_files

    assert issubclass(yaml_files._Loader, yaml.SafeLoader | yaml.CSafeLoader)
