"""Using a cluster: ``dtorch.connect``."""

from __future__ import annotations

import os
from pathlib import Path

from dtorch.session import Session, start
from dtorch.wiring import Options, default_sync


def connect(
    url: str | None = None,
    api_key: str | None = None,
    *,
    ca_file: str | Path | None = None,
    name: str = "",
    sync: bool | None = None,
) -> Session:
    """Use the workers of a head from now on, in place of workers of our own. The rest of a program stays as it is.

    With DTORCH_HEAD and DTORCH_API_KEY set, the first op does this by itself.

    Args:
        url: of the head, such as ``"wss://host:port"`` (``"ws://host:port"`` without TLS). DTORCH_HEAD by default.
        api_key: one of the role "client", made by ``dtorch keys create``. DTORCH_API_KEY by default.
        ca_file: PEM file of the authority that signed the head's certificate, when the system does not know it.
            DTORCH_CA_FILE by default.
        name: for people who list sessions; this machine's name by default.
        sync: run op by op, for debugging; DTORCH_SYNC=1 sets the default.

    Raises:
        AuthError: the head does not accept the key, or its certificate is not trusted.
        ConnectionLostError: there is no head.
        ProtocolError: it speaks another version, or is no head.
        QuotaError: the key has as many sessions as it may have.
        ValueError: no URL or key is given, or the URL names no head.
    """
    return start(cluster_options(url, api_key, ca_file=ca_file, name=name, sync=sync))


def cluster_options(
    url: str | None = None,
    api_key: str | None = None,
    *,
    ca_file: str | Path | None = None,
    name: str = "",
    sync: bool | None = None,
) -> Options:
    """Options of a session that uses a head's workers; arguments as for ``connect``."""
    from dtorch.cluster.remote import Target
    from dtorch.transport.dial import trust

    url = url or os.environ.get("DTORCH_HEAD", "")
    api_key = api_key or os.environ.get("DTORCH_API_KEY", "")
    if not url:
        raise ValueError("which head? Give its URL, such as dtorch.connect('wss://host:port'), or set DTORCH_HEAD")
    if not api_key:
        raise ValueError(
            f"{url} wants an API key: dtorch.connect(url, api_key=...) or DTORCH_API_KEY; "
            "'dtorch keys create NAME' on the head makes one"
        )
    tls = trust(ca_file or os.environ.get("DTORCH_CA_FILE"))
    return Options(sync=default_sync() if sync is None else sync, target=Target(url, api_key, tls, name))
