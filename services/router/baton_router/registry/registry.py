"""Every instance the router knows: those named on the command line and those that registered themselves, by leases."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import grpc.aio
from prometheus_client import CollectorRegistry

from baton.api.v1 import router_pb2
from baton.background import create_task, keep_running
from baton.config.router import RouterConfig, check_address
from baton.errors import BatonError, ConfigError, InvalidRequestError, QueueFullError, UnavailableError
from baton.rpc.channel import open_channel
from baton.rpc.convert import role_from_pb
from baton.rpc.http2.message_stream import Dialer
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls
from baton.tokenizer.model_files import tokenizer_digest
from baton.types import Role
from baton_router.indexer.events import SILENT_BEATS, EventApplier
from baton_router.indexer.prefix_index import PrefixIndex
from baton_router.indexer.stores import Stores
from baton_router.registry.instance import IdentityCheck, Instance, InstanceInfo, Status
from baton_router.registry.instance_monitor import InstanceMonitor, RegistryMetrics
from baton_router.registry.load import Waiters
from baton_router.registry.lost_instances import LostInstances
from baton_router.types import ModelInfo

log = logging.getLogger(__name__)

_TICK_S = 0.25
_STALL_S = 0.5


@dataclass(slots=True)
class Lease:
    """The registration of an instance, valid until ``ends_at`` (monotonic, in seconds)."""

    lease_id: str
    address: str
    ends_at: float


class Leases:
    """The leases of registered instances; heartbeats renew them.

    Args:
        ttl_s: Life of a lease after registration and after each heartbeat, in seconds.
        now: Monotonic clock, in seconds.
    """

    def __init__(self, ttl_s: float, now: Callable[[], float]) -> None:
        self.ttl_s = ttl_s
        self._now = now
        self._by_id: dict[str, Lease] = {}
        self._by_address: dict[str, Lease] = {}

    def __len__(self) -> int:
        """Number of leases, including those that have run out but are not removed yet."""
        return len(self._by_id)

    def addresses(self) -> Collection[str]:
        """Return the addresses that have a lease."""
        return self._by_address.keys()

    def grant(self, address: str) -> Lease:
        """Grant an address a new lease, which replaces an earlier one."""
        old = self._by_address.get(address)
        if old is not None:
            del self._by_id[old.lease_id]
        lease = Lease(secrets.token_hex(16), address, self._now() + self.ttl_s)
        self._by_id[lease.lease_id] = self._by_address[address] = lease
        return lease

    def renew(self, lease_id: str) -> bool:
        """Renew a lease by a heartbeat; ``False``: there is no such lease any more."""
        lease = self._by_id.get(lease_id)
        if lease is None or lease.ends_at <= self._now():
            return False
        lease.ends_at = self._now() + self.ttl_s
        return True

    def end(self, lease_id: str) -> str | None:
        """End a lease; return its address."""
        lease = self._by_id.pop(lease_id, None)
        if lease is None:
            return None
        del self._by_address[lease.address]
        return lease.address

    def drop_address(self, address: str) -> None:
        """End the lease of an address, if it has one."""
        lease = self._by_address.get(address)
        if lease is not None:
            self.end(lease.lease_id)

    def extend(self, seconds: float) -> None:
        """Extend every lease, by a time in which this router could receive no heartbeat."""
        for lease in self._by_id.values():
            lease.ends_at += seconds

    def remove_expired(self) -> list[str]:
        """Remove the leases that ran out and return their addresses."""
        now = self._now()
        return [self.end(x.lease_id) or "" for x in list(self._by_id.values()) if x.ends_at <= now]


class Registry:
    """The instances, their monitors and their leases.

    The first instance that answers decides which model is served; one with incompatible KV is refused until every
    instance of the other kind is gone: a stream that moved there would continue with another model. Instances may
    differ in how the same KV is split (block size, ranks). Instances of equal block size share their block hashes and
    form a group, identified by the content key, the root of its hash chains.

    Args:
        config: Addresses, intervals, limits.
        metrics: Registry of the metrics.
        token: Shared token to prove to instances.
        tls: Certificates, if the services use TLS.
        now: Monotonic clock, in seconds.
        waiters: Requests that wait for an instance; ``None``: a new queue.
        limit: Called with an instance that was identified, before its first request, to set ``instance.load.limit``;
            ``None``: instances have no limit.

    Attributes:
        index: Prefix index of all instances and stores.
        waiters: Requests that wait for an instance.
        stores: The KV stores.
        lost: Instances that were lost lately.
        leases: Leases of registered instances.
        on_silent: Called with :attr:`silent_prefills` whenever they have changed.
    """

    def __init__(
        self,
        config: RouterConfig,
        metrics: CollectorRegistry,
        *,
        token: Token | None = None,
        tls: Tls | None = None,
        now: Callable[[], float] = time.monotonic,
        waiters: Waiters | None = None,
        limit: Callable[[Instance, InstanceInfo], None] | None = None,
    ) -> None:
        self._config = config
        self._token = token
        self._tls = tls
        self._now = now
        self.index = PrefixIndex(config.index_max_blocks)
        self.waiters = Waiters() if waiters is None else waiters
        self._limit = limit
        self.lost = LostInstances(self.instances, now)
        self._metrics = RegistryMetrics(metrics, self.instances, self.lost, self.waiters)
        refused = self._metrics.redis_refused.labels("kvstore").inc
        self.stores = Stores(config, self.index, self._metrics.index, self._open, now, token, refused)
        metrics.register(self.stores)
        self.leases = Leases(config.lease_ttl_s, now)
        self._static = frozenset((*config.prefill, *config.decode))
        self._instances: dict[str, Instance] = {}
        self._model: ModelInfo | None = None
        self._ready: dict[Role, list[Instance]] = {}
        self._monitors: dict[str, tuple[InstanceMonitor, asyncio.Task[None]]] = {}
        self._retired: set[asyncio.Task[None]] = set()
        self._discovered: dict[str, frozenset[str]] = {}
        self._silent: frozenset[str] = frozenset()
        self.on_silent: Callable[[frozenset[str]], None] = lambda addresses: None
        tokenizer = tokenizer_digest(config.model) if config.model else ""
        self._identity = IdentityCheck(tokenizer, config.block_size)
        self._ticker: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connect to the static instances and begin to watch the leases; needs a running loop."""
        for role, addresses in ((Role.PREFILL, self._config.prefill), (Role.DECODE, self._config.decode)):
            for address in addresses:
                self._add(address, role)
        self.stores.start()
        self._ticker = keep_running(self._tick, "registry")

    async def close(self) -> None:
        """End every monitor and channel."""
        tasks = [*(task for _, task in self._monitors.values()), *self._retired]
        if self._ticker is not None:
            tasks.append(self._ticker)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.stores.close()
        await asyncio.gather(*(x.close() for x in self._instances.values()))
        self._instances.clear()
        self._monitors.clear()
        self._changed()

    # --- the instances ---

    def instances(self) -> list[Instance]:
        """Return all instances, whatever their state."""
        return list(self._instances.values())

    def ready(self, role: Role) -> list[Instance]:
        """Return the instances of a role that accept new requests; callers must not change the list.

        Silent instances are among them only if all are silent. It is the same list object until some instance becomes
        more or less usable.
        """
        ready = self._ready.get(role)
        if ready is None:
            usable = [x for x in self._instances.values() if x.role is role and x.ready]
            ready = self._ready[role] = [x for x in usable if not x.silent] or usable
        return ready

    @property
    def silent_prefills(self) -> frozenset[str]:
        """Addresses of prefill instances that answered before and do not answer now."""
        known = [x for x in self._instances.values() if x.role is Role.PREFILL and x.info is not None]
        return frozenset(x.address for x in known if x.silent or x.status is Status.DOWN)

    def model_info(self) -> ModelInfo:
        """Return the served model; ``max_model_len`` is the least of the decode instances, which own requests.

        Raises:
            UnavailableError: No instance is ready.
        """
        if self._model is not None:
            return self._model
        ready = self.ready(Role.DECODE) or self.ready(Role.PREFILL)
        infos = [x.info for x in ready if x.info is not None]
        if not infos:
            raise UnavailableError("no instance is ready", retry_after_s=1.0)
        self._model = ModelInfo(
            name=infos[0].model_names[0],
            names=tuple(dict.fromkeys(name for info in infos for name in info.model_names)),
            path=infos[0].model_path,
            max_model_len=min(info.max_model_len for info in infos),
            vocab_size=infos[0].vocab_size,
            eos_token_ids=infos[0].eos_token_ids,
            grammars=any(info.grammars for info in infos),
        )
        return self._model

    async def wait_changed(self, timeout_s: float) -> None:
        """Wait until some instance became more or less usable or has room, at most ``timeout_s`` seconds."""
        await self.waiters.wait(timeout_s)

    def none_free(self) -> BatonError:
        """Return the error for a request that no decode instance accepts."""
        if self.ready(Role.DECODE):
            return QueueFullError("every decode instance has all the requests it may have", retry_after_s=1.0)
        return UnavailableError("no decode instance is ready", retry_after_s=1.0)

    def _changed(self) -> None:
        self._model = None
        self._ready.clear()
        silent = self.silent_prefills
        if silent != self._silent:
            self._silent = silent
            self.on_silent(silent)
        self.waiters.wake_all()

    # --- discovery ---

    def registered(self) -> list[tuple[str, Role]]:
        """Return the addresses of the instances that registered themselves here."""
        known = self._instances
        return [(x, known[x].role) for x in self.leases.addresses() if x in known]

    def set_discovered(self, source: str, instances: Mapping[str, Role]) -> None:
        """Set the instances that a source of discovery names now; those that only it named before are removed.

        Args:
            source: Name of the source.
            instances: Roles by address.
        """
        before = self._discovered.get(source, frozenset())
        self._discovered[source] = frozenset(instances)
        for address, role in instances.items():
            if address in self._instances:
                continue
            if len(self._instances) >= self._config.max_instances:
                log.warning("%s, found by %s, is one instance too many", address, source)
                break
            log.info("%s instance at %s found by %s", role, address, source)
            self._add(address, role)
        for address in before.difference(instances):
            known = self._instances.get(address)
            lost = known is not None and (known.silent or known.status is Status.DOWN)
            self._drop_registered(address, f"{source} names it no more", lost=lost)

    def discovery_failed(self, source: str) -> None:
        """Count a failed attempt to find instances in Redis or Kubernetes."""
        self._metrics.discovery_failures.labels(source).inc()

    def refused_in_redis(self, kind: str, count: int = 1) -> None:
        """Count entries in Redis that were not accepted.

        Args:
            kind: ``instance`` or ``replica``.
            count: Number of entries.
        """
        self._metrics.redis_refused.labels(kind).inc(count)

    def _is_named(self, address: str) -> bool:
        return address in self._static or any(
            address in x for x in (*self._discovered.values(), self.leases.addresses())
        )

    # --- registration ---

    def register(self, request: router_pb2.RegisterRequest) -> router_pb2.RegisterResponse:
        """Register an instance, or renew its registration.

        Raises:
            InvalidRequestError: Address, name or role is missing or wrong, or another live instance has the name.
            QueueFullError: Too many instances.
        """
        try:
            check_address(request.address, field="address")
        except ConfigError as error:
            raise InvalidRequestError(error.message, field="address") from error
        if not request.instance_id or len(request.instance_id) > 256:
            raise InvalidRequestError("instance_id must have 1 to 256 characters", field="instance_id")
        if not request.instance_id.isprintable():
            raise InvalidRequestError("instance_id must have printable characters alone", field="instance_id")
        role = role_from_pb(request.role)
        address = self._same_static(request) or request.address
        namesakes = self._namesakes(request, address)
        known = self._instances.get(address)
        if known is None and len(self._instances) >= self._config.max_instances:
            raise QueueFullError(f"{len(self._instances)} instances are known already", retry_after_s=10.0)
        if known is not None and known.role is not role:
            if address in self._static:
                raise InvalidRequestError(f"{address} is known as a {known.role} instance", field="role")
            self._remove(address)
        for other in namesakes:
            # The same instance came back on another port before its old lease ran out.
            if other.address not in self._static:
                self.leases.drop_address(other.address)
                self._remove(other.address)
        if address not in self._instances:
            self._add(address, role)
        lease = self.leases.grant(address)
        self._metrics.registrations.labels("registered").inc()
        log.info("%s instance %s registered from %s", role, request.instance_id, address)
        return router_pb2.RegisterResponse(lease_id=lease.lease_id, ttl_ms=int(1000 * self.leases.ttl_s))

    def _namesakes(self, request: router_pb2.RegisterRequest, address: str) -> list[Instance]:
        """Return the instances of the same name at other addresses, none of which is another live process.

        Raises:
            InvalidRequestError: One is; the two would replace each other again and again.
        """
        namesakes = [x for x in self.instances() if x.instance_id == request.instance_id and x.address != address]
        for x in namesakes:
            if x.admitted and x.info is not None and x.info.epoch != request.epoch:
                raise InvalidRequestError(
                    f"instance_id {request.instance_id!r} belongs to the instance at {x.address}, which is alive",
                    field="instance_id",
                )
        return namesakes

    def _same_static(self, request: router_pb2.RegisterRequest) -> str | None:
        """Return the address of the static instance that is the same process under another spelling of its address."""
        for x in self.instances():
            if x.address not in self._static or x.info is None:
                continue
            if (x.info.instance_id, x.info.epoch) == (request.instance_id, request.epoch):
                return x.address
        return None

    def heartbeat(self, lease_id: str) -> bool:
        """Renew a lease; ``False``: the instance must register again."""
        return self.leases.renew(lease_id)

    def deregister(self, lease_id: str) -> None:
        """Remove an instance that leaves; unknown leases are no error. Its running requests go on."""
        address = self.leases.end(lease_id)
        if address is not None:
            self._metrics.registrations.labels("deregistered").inc()
            self._drop_registered(address, "it deregistered")

    def expire(self) -> None:
        """Remove the instances whose lease ran out."""
        for address in self.leases.remove_expired():
            self._metrics.registrations.labels("expired").inc()
            self._drop_registered(address, "its lease ran out", lost=True)

    def _drop_registered(self, address: str, why: str, *, lost: bool = False) -> None:
        """Remove an instance that nothing names any more.

        Args:
            address: Address of the instance.
            why: Source that named the instance last (discovery, its lease), and why it no longer does.
            lost: Whether it did not announce that it leaves.
        """
        instance = self._instances.get(address)
        if instance is None or self._is_named(address):
            return
        if not lost or instance.leaving or instance.info is None:
            log.info("%s instance %s is forgotten: %s", instance.role, instance.instance_id, why)
            self._remove(address, silent=lost)
            return
        log.warning("%s instance %s is lost: %s", instance.role, instance.instance_id, why)
        if instance.status is Status.READY:
            self._metrics.lost.labels(instance.role.value).inc()
        reason = f"{why}; {instance.reason}" if instance.reason else why
        self._remove(address, silent=True)
        self.lost.add(instance, reason)

    # --- inside ---

    def _open(self, address: str) -> grpc.aio.Channel:
        return open_channel(address, token=self._token, tls=self._tls)

    def _add(self, address: str, role: Role) -> None:
        events = EventApplier(
            self.index,
            now=self._now,
            stale_limit_s=self._config.index_stale_limit_s,
            decision_ttl_s=self._config.index_decision_ttl_s,
            settle_s=SILENT_BEATS * self._config.index_heartbeat_ms / 1000,
        )
        dialer = Dialer(address, token=self._token, tls=self._tls)
        instance = Instance(address, role, self._open(address), dialer, events)
        monitor = InstanceMonitor(instance, self._config, self._metrics, admit=self._admit, changed=self._changed)
        self._instances[address] = instance
        self._monitors[address] = monitor, keep_running(monitor.run, "monitor", detail=address)

    def _remove(self, address: str, *, silent: bool = False) -> None:
        """Remove an instance from placement; its channel is closed when its last request has ended.

        Args:
            address: Address of the instance.
            silent: Whether it did not announce that it leaves, so that it may hang: the first missed probe breaks off
                its requests.
        """
        instance = self._instances.pop(address)
        monitor, running = self._monitors.pop(address)
        instance.status = Status.DOWN
        instance.reason = "it left"
        running.cancel()
        failures = 1 if silent else self._config.probe_failures
        task = create_task(self._retire(instance, monitor, running, failures), "retire", detail=address)
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)
        self._changed()

    async def _retire(
        self, instance: Instance, monitor: InstanceMonitor, running: asyncio.Task[None], failures: int
    ) -> None:
        await asyncio.gather(running, return_exceptions=True)
        instance.status = Status.DOWN
        instance.reason = "it left"
        instance.events.close()
        if all(x.instance_id != instance.instance_id for x in self._instances.values()):
            self._metrics.index.remove(instance.instance_id)
        watch = keep_running(partial(monitor.watch_last_requests, failures), "watch", detail=instance.address)
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                await instance.wait_idle()
        except TimeoutError:
            log.warning("requests on %s outlived their deadline", instance.instance_id)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await instance.close()

    def _admit(self, instance: Instance, info: InstanceInfo) -> None:
        """Check the identity of the process that answers at an address.

        Raises:
            ConfigError: It has another role than expected.
            FingerprintMismatchError: Its KV, hashes or token ids differ from the other instances'; names the field.
        """
        others = any(x.admitted for x in self._instances.values() if x is not instance)
        self._identity.admit(info, instance.role, first=not others)
        if self._limit is not None:
            self._limit(instance, info)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            late = loop.time() - due
            if late > _STALL_S:
                # Heartbeats that arrived meanwhile are still unread: no lease may end because this router stood still.
                log.warning("the router stood still for %.1f s", late)
                self.leases.extend(late)
                for x in self.instances():
                    x.events.stood_still(late)
                self.stores.stood_still(late)
            self.expire()
            for x in self.instances():
                x.events.tick()
            self.stores.tick()
            self.index.sweep()
