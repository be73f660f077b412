"""TLS in front of a server on 127.0.0.1, with certificates that OpenSSL's own tool makes."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from contextlib import suppress
from pathlib import Path


class Tls:
    """A TLS server that passes everything on to a plain one."""

    def __init__(self, endpoint: str, directory: Path) -> None:
        self._upstream = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        self._directory = directory
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"https://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def certificate(self, name: str) -> Path:
        """Make a certificate of a host; return its file."""
        key, certificate = self._directory / f"{name}.key", self._directory / f"{name}.pem"
        made = ["-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=test"]
        command = ["openssl", "req", "-x509", *made, "-addext", f"subjectAltName={name}"]
        subprocess.run(command, check=True, capture_output=True)
        return certificate

    def use(self, certificate: Path) -> None:
        """Be the host of a certificate from now on."""
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, certificate.with_suffix(".key"))

    def close(self) -> None:
        self._server.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                plain, _ = self._server.accept()
                with suppress(OSError):
                    client = self._context.wrap_socket(plain, server_side=True)
                    server = socket.create_connection(self._upstream)
                    for ends in ((client, server), (server, client)):
                        threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with source, suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)
