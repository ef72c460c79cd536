"""The private etcd, as tests and benchmarks use it."""

from __future__ import annotations

from asyncrl.runtime.names.etcd import server


class EtcdServer(server.EtcdServer):
    """Runs inside a `with` block."""

    def restart(self) -> None:
        """Stop the server if it runs, and start it again with the same data and ports."""
        self.stop()
        self.start()

    def __enter__(self) -> EtcdServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
