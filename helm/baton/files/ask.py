"""Asks a router for four tokens, again until it answers or the time is up: ``ask.py URL SECONDS``."""

import os
import pathlib
import ssl
import sys
import time
import tomllib

import httpx


def main() -> None:
    """Print the answer."""
    url, deadline = sys.argv[1], time.monotonic() + float(sys.argv[2])
    files = pathlib.Path(os.environ.get("BATON_TEST_FILES", "/run/baton"))
    keys, ca = files / "auth/api-keys.toml", files / "tls/ca.crt"
    headers = {}
    if keys.exists():
        tenant = next(iter(tomllib.loads(keys.read_text())["tenants"].values()))
        headers["authorization"] = f"Bearer {tenant['keys'][0]}"
    verify = ssl.create_default_context(cafile=str(ca)) if ca.exists() else True
    with httpx.Client(base_url=url, headers=headers, verify=verify, timeout=30, trust_env=False) as client:
        while True:
            try:
                model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
                body = {"model": model, "prompt": "The baton is", "max_tokens": 4, "temperature": 0}
                answer = client.post("/v1/completions", json=body).raise_for_status()
                break
            except (httpx.HTTPError, IndexError) as error:
                if time.monotonic() > deadline:
                    raise SystemExit(f"{url} gave no answer: {error}") from error
                time.sleep(1)
    print(model, answer.json()["choices"][0]["text"], answer.headers["x-baton-path"])  # noqa: T201


main()
