"""What a server is told at its start. Pure Python."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from ridgeline.core.errors import bad_value


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Address, keys and bounds of one server; every time is in seconds."""

    host: str = "127.0.0.1"
    """Address to listen on; only this machine unless said otherwise."""
    port: int = 8000
    """0: any free port."""
    model_name: str = "model"
    """What clients call the model: a label, never a path."""
    api_keys: tuple[str, ...] = ()
    """Keys that are accepted; none: no key is asked for."""
    max_requests: int = 256
    """Requests inside at once, those that are read or rendered included; more get a 429."""
    max_connections: int = 1024
    """Open connections; more get a 429 and are closed."""
    max_body_bytes: int = 4 * 2**20
    max_header_bytes: int = 16 * 1024
    max_prompts: int = 64
    """Prompts of one request to /v1/completions or /v1/embeddings."""
    header_timeout_s: float = 10.0
    """Until a connection's request line and headers are in."""
    body_timeout_s: float = 30.0
    """Until a request's body is in."""
    write_timeout_s: float = 30.0
    """How long a reader may take nothing of what is sent before it is dropped."""
    deadline_s: float = 600.0
    """A request that takes longer is ended; `deadline_s` of a request can only shorten it."""
    drain_s: float = 30.0
    """After SIGTERM: how long requests in flight may go on."""
    dead_s: float = 2.0
    """How long a dead engine is told with 503 before the server ends."""
    template_timeout_s: float = 2.0
    """Of rendering one chat template."""
    grammar_timeout_s: float = 5.0
    """Of compiling one grammar."""
    watch: Path | None = None
    """A folder of model folders: the newest whole one is loaded when it appears."""
    watch_every_s: float = 2.0
    reload_root: Path | None = None
    """Folders that POST /admin/reload may name lie in it; None: only the folder served."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise bad_value("serve", "port", "lie in 0 .. 65535", self.port, "change it")
        if not self.model_name or len(self.model_name) > 200:
            raise bad_value(
                "serve", "model_name", "have 1 .. 200 characters", len(self.model_name), "change it"
            )
        for name in ("max_requests", "max_connections", "max_prompts", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise bad_value("serve", name, "be at least 1", getattr(self, name), "raise it")
        if self.max_header_bytes < 1024:
            raise bad_value(
                "serve", "max_header_bytes", "be at least 1024", self.max_header_bytes, "raise it"
            )
        for name in self.__dataclass_fields__:
            if name.endswith("_s") and not getattr(self, name) > 0:
                raise bad_value("serve", name, "be above 0", getattr(self, name), "raise it")
        if any(len(key) < 8 for key in self.api_keys):
            raise bad_value(
                "serve",
                "api_keys",
                "have at least 8 characters each",
                "a shorter one",
                "use longer",
            )

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
