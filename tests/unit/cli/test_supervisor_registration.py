"""A start that fails: the supervisor names the process, says why it gave up, and tells mistakes from failures."""

from __future__ import annotations

import subprocess
import sys

import grpc
import grpc.aio
import pytest

from baton.api.v1 import router_pb2, router_pb2_grpc
from baton.cli.supervisor import DeploymentPlan, ProcessSpec, Supervisor
from baton.errors import BatonError, ConfigError, UnavailableError


class LonelyRouter(router_pb2_grpc.RouterServiceServicer):
    def __init__(self, refusal: str, refused: str = "") -> None:
        self.refusal, self.refused = refusal, refused

    async def ListInstances(self, request, context):
        if self.refusal:
            await context.abort(grpc.StatusCode.INTERNAL, self.refusal)
        if self.refused:
            status = router_pb2.InstanceStatus(instance_id="decode-0", refused=self.refused)
            return router_pb2.ListInstancesResponse(instances=[status])
        return router_pb2.ListInstancesResponse()


@pytest.mark.parametrize(
    ("router", "timeout_s", "told"),
    [
        (LonelyRouter(""), 0.3, "the router does not see decode-0: time is up"),
        (LonelyRouter("no registry"), 240.0, "the router does not see decode-0: no registry"),
        (LonelyRouter("", "kv_dtype differs"), 240.0, "the router refuses decode-0: kv_dtype differs"),
    ],
)
async def test_an_instance_that_the_router_does_not_take_is_named_with_the_reason(router, timeout_s, told):
    server = grpc.aio.server()
    router_pb2_grpc.add_RouterServiceServicer_to_server(router, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    spec = ProcessSpec("router", "", (), address, "router")
    decode = ProcessSpec("decode-0", "", (), "", "decode")
    plan = DeploymentPlan(None, spec, (decode,), "", address)
    supervisor = Supervisor(plan, lambda *_: None, ready_timeout_s=timeout_s)
    with pytest.raises(UnavailableError, match=f"^{told}$"):
        await supervisor._wait_registered()
    await server.stop(None)


@pytest.mark.parametrize(("status", "error"), [(1, UnavailableError), (2, ConfigError)])
async def test_a_configuration_that_cannot_work_is_told_from_a_failure(status: int, error: type[BatonError]) -> None:
    def start(spec: ProcessSpec, env: dict[str, str]) -> subprocess.Popen[bytes]:
        program = f"import sys; print('why it ends'); sys.exit({status})"
        return subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE)

    router = ProcessSpec("router", "", (), "127.0.0.1:9", "router")
    supervisor = Supervisor(DeploymentPlan(None, router, (), "", ""), lambda *_: None)
    supervisor.spawn = start
    with pytest.raises(BatonError) as raised:
        await supervisor.start()
    assert type(raised.value) is error
    assert raised.value.message == f"router ended with status {status} before it was ready: why it ends"
    await supervisor.stop()
