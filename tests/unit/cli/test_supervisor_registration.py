"""A router that never sees an instance: the supervisor names it and says why it gave up."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from baton.api.v1 import router_pb2, router_pb2_grpc
from baton.cli.supervisor import DeploymentPlan, ProcessSpec, Supervisor
from baton.errors import UnavailableError


class LonelyRouter(router_pb2_grpc.RouterServiceServicer):
    def __init__(self, refusal: str) -> None:
        self.refusal = refusal

    async def ListInstances(self, request, context):
        if self.refusal:
            await context.abort(grpc.StatusCode.INTERNAL, self.refusal)
        return router_pb2.ListInstancesResponse()


@pytest.mark.parametrize(("refusal", "reason"), [("", "time is up"), ("no registry", "no registry")])
async def test_an_instance_that_the_router_never_sees_is_named_with_the_reason(refusal, reason):
    server = grpc.aio.server()
    router_pb2_grpc.add_RouterServiceServicer_to_server(LonelyRouter(refusal), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    router = ProcessSpec("router", "", (), address, "router")
    decode = ProcessSpec("decode-0", "", (), "", "decode")
    plan = DeploymentPlan(None, router, (decode,), "", address)
    supervisor = Supervisor(plan, lambda *_: None, ready_timeout_s=0.3)
    with pytest.raises(UnavailableError, match=f"does not see decode-0: {reason}$"):
        await supervisor._wait_registered()
    await server.stop(None)
