"""A server on the loopback over an engine in this process, with tiny models: one for all tests of a file."""

from __future__ import annotations

import json
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from actors.drafters.config import DrafterConfig
from actors.drafters.model.config import ModelDrafterConfig
from actors.options import PipelineConfig, SamplingConfig, SchedulerConfig, TargetConfig, VerifyConfig
from cluster.config.jobs import ServeConfig
from cluster.config.schema import ClusterConfig, ClusterName, LaunchConfig, PlacementConfig, PlacementName, ServerConfig
from cluster.engine import Engine
from cluster.serving.app import HttpService
from cluster.serving.server import HttpServer, bind

KEY = "a key"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NUM_DRAFT_TOKENS = 4
IN_PROCESS = ClusterConfig(ClusterName.inprocess, oversubscribe=True)
ALWAYS_DRAFTING = PipelineConfig(adaptive=False)


@dataclass
class RunningServer:
    """The parts of a server, and clients of it."""

    engine: Engine
    service: HttpService
    http: HttpServer

    @property
    def url(self) -> str:
        return self.http.url

    def client(self, key: str = KEY, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **{"max_retries": 0, "timeout": 60, **options})

    def ask(
        self, path: str, body: object = None, *, key: str | None = KEY, method: str | None = None, **headers: str
    ) -> tuple[int, Any, Any]:
        """Status, headers and content of an answer, read as JSON if it is that."""
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **headers}
        request = urllib.request.Request(self.url + path, content, headers, method=method)
        if key is not None:
            request.add_header("authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                status, found, text = reply.status, reply.headers, reply.read()
        except urllib.error.HTTPError as error:
            status, found, text = error.code, error.headers, error.read()
        return status, found, json.loads(text) if found.get_content_type() == "application/json" else text.decode()

    def num_running(self) -> int:
        """Completions that the engine has not ended."""
        return len(self.engine._live)


def until(condition: Callable[[], bool]) -> None:
    """Waits for it, a minute at most."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="session")
def chat_checkpoint(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with a chat template."""
    path = tmp_path_factory.mktemp("chat") / "tiny-chat"
    shutil.copytree(tiny_checkpoint("Llama"), path)
    settings = {"bos_token": {"content": "<|endoftext|>"}, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@contextmanager
def serving(
    checkpoint: Path,
    drafter: Path | DrafterConfig,
    *,
    pace_ms: float = 0.0,
    keys: Sequence[str] = (KEY,),
    cluster: ClusterConfig = IN_PROCESS,
    pipeline: PipelineConfig = ALWAYS_DRAFTING,
    **server: object,
) -> Iterator[RunningServer]:
    if isinstance(drafter, Path):
        drafter = ModelDrafterConfig(path=str(drafter), num_draft_tokens=NUM_DRAFT_TOKENS, device="cpu")
    config = LaunchConfig(
        target=TargetConfig(path=str(checkpoint), device="cpu", pace_ms=pace_ms),
        drafter=drafter,
        verify=VerifyConfig(),
        pipeline=pipeline,
        placement=PlacementConfig(PlacementName.colocated),
        cluster=cluster,
        job=ServeConfig(),
        scheduler=SchedulerConfig(max_num_seqs=4),
        sampling=SamplingConfig(),
        server=ServerConfig(**{"port": 0, "max_waiting": 4, **server}),
    )
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
        engine = stack.enter_context(Engine(config))
        service = HttpService(engine, config, keys)
        http = HttpServer(service.application, bind("127.0.0.1", 0))
        stack.callback(service.close)
        stack.callback(http.close)
        yield RunningServer(engine, service, http)


@pytest.fixture(scope="module")
def server(chat_checkpoint: Path, half_agreeing_drafter: Path) -> Iterator[RunningServer]:
    with serving(chat_checkpoint, half_agreeing_drafter) as running:
        running.service.warm_up()
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.client() as opened:
        yield opened
