"""The fallbacks for Ray's private names: they cost time or detail, never protection. No Ray is started here."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from harness.errors import ClusterError
from harness.launch.ray import cluster, controller, private, session
from tests.conftest import laptop

PACKAGE = Path(private.__file__).parents[2]


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray without any of the private names."""
    monkeypatch.setattr(private, "find", lambda module, name: None)
    monkeypatch.setattr(private, "CALLBACKS", "_absent")


def test_private_names_stand_in_one_module() -> None:
    private_name = re.compile(r"(?<![.\w])ray\.[\w.]*\b_[a-z]|from ray\b.* import .*\b_[a-z]|_create_default_callbacks")
    users = {path.name for path in PACKAGE.rglob("*.py") if private_name.search(path.read_text())}
    assert users == {"private.py"}


def test_the_installed_ray_has_the_names() -> None:
    for module, name in (
        ("ray._private.ray_constants", "ENABLE_RAY_CLUSTER"),
        ("ray._private.ray_constants", "env_bool"),
        ("ray._raylet", "Config"),
        ("ray._raylet", "AuthenticationTokenLoader"),
        ("ray._private.auto_init_hook", "enable_auto_connect"),
        ("ray.train.v2._internal.execution.callback", "WorkerGroupCallback"),
        ("ray.train.torch", "TorchTrainer"),
    ):
        assert private.find(module, name) is not None, name
        assert private.find(module, "NO_SUCH_NAME") is None and private.find("ray._private.no_such", name) is None


@pytest.mark.parametrize(
    "gone", [None, "enable_auto_connect", "Config", "AuthenticationTokenLoader", "ENABLE_RAY_CLUSTER", "env_bool"]
)
@pytest.mark.parametrize("fixed", [{"RAY_AUTH_MODE": "token"}, {}])
def test_ray_without_certain_protection_is_not_started(
    gone: str | None, fixed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All names are gone (None), or one of them."""
    find, before = private.find, dict(os.environ)
    monkeypatch.setattr(private, "find", lambda module, name: None if gone in (None, name) else find(module, name))
    refused = r"was imported before its authentication token .* nothing was started"
    with pytest.raises(ClusterError, match=refused), session.as_ray_reads({}, fixed):
        raise AssertionError("it was used")
    assert dict(os.environ) == before


def test_without_protection_neither_an_embedded_nor_an_external_cluster_is_used(
    absent: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "init", lambda *_, **__: pytest.fail("Ray was started"))
    monkeypatch.setattr(cluster, "check_reachable", lambda address: pytest.fail("a cluster was asked"))
    with pytest.raises(ClusterError, match="nothing was started"), cluster.start_embedded(laptop()):
        raise AssertionError("it was used")
    with pytest.raises(ClusterError, match="nothing was started"), cluster.connect("head:6379", {}):
        raise AssertionError("it was used")


def test_ray_imported_after_the_variables_are_set_is_protected(absent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray")
    imported: list[dict[str, str]] = []

    class Importer:
        """Imports ray: an object, with what the environment was then."""

        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:
            if name == "ray":
                imported.append(dict(os.environ))
                sys.modules["ray"] = ray
                raise ImportError("as far as this test needs it")

    monkeypatch.setattr(sys, "meta_path", [Importer, *sys.meta_path])
    with pytest.raises(ImportError, match="as far as"), session.as_ray_reads({}, {"RAY_AUTH_TOKEN": "ours"}):
        raise AssertionError
    assert imported[0]["RAY_AUTH_TOKEN"] == "ours" and imported[0]["RAY_ENABLE_AUTO_CONNECT"] == "0"


def test_without_the_private_argument_the_session_folder_is_named_by_a_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[dict[str, Any], str | None]] = []

    def init(**arguments: Any) -> None:
        calls.append((arguments, os.environ.get("RAY_TMPDIR")))
        if "_temp_dir" in arguments:
            raise RuntimeError("Unknown keyword argument(s): _temp_dir")

    @contextmanager
    def variables(fixed: Any) -> Iterator[None]:
        with monkeypatch.context() as patch:
            for name, value in fixed.items():
                patch.setenv(name, value)
            yield

    def failing(**arguments: Any) -> None:
        raise RuntimeError("no space left")

    monkeypatch.setattr(ray, "init", failing)
    with pytest.raises(RuntimeError, match="no space left"):  # no missing name
        private.init(tmp_path, lambda fixed: pytest.fail("tried again"))
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    private.init(tmp_path, variables, num_cpus=2)
    assert calls == [({"num_cpus": 2, "_temp_dir": str(tmp_path)}, None), ({"num_cpus": 2}, str(tmp_path))]
    private.init(None, variables, address="head:6379")
    assert calls[2:] == [({"address": "head:6379"}, None)]


def test_processes_are_killed_at_once_or_as_ray_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    node = SimpleNamespace(kill_all_processes=lambda **named: calls.append(named))
    found: list[Any] = [node]
    monkeypatch.setattr(private, "find", lambda module, name: found[0])
    monkeypatch.setattr(ray, "shutdown", lambda: node.kill_all_processes(check_alive=False, allow_graceful=True))
    private.shut_down()
    assert calls == [{"check_alive": False, "allow_graceful": False}]

    def with_other_parameters(allow_graceful: bool = False, wait: int = 0) -> None:
        calls.append({"wait": wait})

    node.kill_all_processes = with_other_parameters
    monkeypatch.setattr(ray, "shutdown", lambda: node.kill_all_processes(wait=3))
    private.shut_down()
    found[0] = None  # a Ray without the name of its node
    private.shut_down()
    assert calls[1:] == [{"wait": 3}] * 2


def test_without_ray_s_callback_class_the_start_has_one_part_less(
    absent: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(controller.startup_callbacks("mailbox", 0)) == 1
    assert private.worker_group_callback() is object
    monkeypatch.setattr(controller, "WorkerGroupCallback", object)
    assert controller.startup_callbacks("mailbox", 0) == []


@pytest.mark.parametrize(("name", "left"), [(private.CALLBACKS, [1]), ("_absent", [1, "two"])])
def test_callbacks_are_dropped_by_name_or_stay(name: str, left: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Trainer:
        def _create_default_callbacks(self) -> list[Any]:
            return [1, "two"]

    monkeypatch.setattr(private, "CALLBACKS", name)
    trainer = Trainer()
    private.drop_callbacks(trainer, ("str",))
    assert trainer._create_default_callbacks() == left
