"""The API server of a Kubernetes cluster, as a pod with a service account reaches it."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from baton.config.environment import in_cluster_api
from baton.config.files import read_small_file
from baton.errors import ConfigError

_TIMEOUT_S = 10.0


class KubernetesApi:
    """A client of an API server, authenticated as a service account.

    Args:
        api: URL of the API server; empty: that of this pod's cluster.
        account: Folder with the account's ``token``, ``ca.crt`` and ``namespace``.
        namespace: Namespace of the objects; empty: this pod's.

    Attributes:
        namespace: Namespace of the objects.
        http: HTTP client; its requests need :meth:`headers`.

    Raises:
        ConfigError: The account's files are missing, or this is no pod and no API server was named.
    """

    def __init__(self, api: str, account: str, namespace: str) -> None:
        folder = Path(account)
        self._token_file = folder / "token"
        ca = folder / "ca.crt"
        url = api or in_cluster_api()
        if not url:
            raise ConfigError("this is no pod: name the API server", field="kubernetes_api")
        self.namespace = namespace or _read(folder / "namespace")
        try:
            verify = ssl.create_default_context(cadata=_read(ca)) if url.startswith("https:") else False
        except (OSError, ValueError) as error:  # ssl's own errors too
            raise ConfigError(f"cannot read {ca}: {error}", field="kubernetes_account") from error
        self.http = httpx.AsyncClient(base_url=url, verify=verify, timeout=httpx.Timeout(_TIMEOUT_S), trust_env=False)
        self.headers()

    def headers(self) -> dict[str, str]:
        """Return the headers of every request; the token is read each time, because the kubelet replaces it.

        Raises:
            ConfigError: The token cannot be read.
        """
        return {"authorization": f"Bearer {_read(self._token_file)}", "accept": "application/json"}

    async def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """Send a request.

        Args:
            method: HTTP method.
            path: Path below the server's URL.
            body: JSON body; ``None``: no body.
            headers: Headers in addition to :meth:`headers`.

        Raises:
            httpx.HTTPError: The server does not answer.
        """
        return await self.http.request(method, path, json=body, headers={**self.headers(), **(headers or {})})

    async def close(self) -> None:
        await self.http.aclose()


def _read(path: Path) -> str:
    text = read_small_file(path, "the service account's", "kubernetes_account").decode(errors="replace").strip()
    if not text:
        raise ConfigError(f"the service account's {path} is empty", field="kubernetes_account")
    return text
