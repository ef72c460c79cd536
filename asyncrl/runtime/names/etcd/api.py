"""gRPC and etcd3's stubs, loaded when the first resolver is opened, because gRPC must not be loaded before a fork.

Only the generated code of etcd3==0.12.0 is used. The session layer is our own (resolver.py, store.py), because etcd3's
client does not survive an outage.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import threading
import types
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from asyncrl.runtime.names.interface import NameResolveError


@dataclass(frozen=True)
class Api:
    grpc: Any
    rpc: Any  # etcd3.etcdrpc: messages and stubs


_load_lock = threading.Lock()


def load_api() -> Api:
    """Return gRPC and etcd3's stubs, imported at the first call."""
    with _load_lock:
        return _load_api()


@cache
def _load_api() -> Api:
    """Work around etcd3's generated modules, which target protobuf 3 and raise in newer versions ("Descriptors cannot
    be created directly").

    The descriptors inside them are still valid. They are read from the sources without running them, and the modules
    are built from them in a separate descriptor pool (other packages may also contain a kv.proto or rpc.proto).
    """
    with warnings.catch_warnings():  # etcd3 and its imports were written for older Pythons
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", SyntaxWarning)
        import grpc
        from google.protobuf import descriptor_pool
        from google.protobuf.internal import builder

        spec = importlib.util.find_spec("etcd3")
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError("name resolve needs the package etcd3; run `pip install etcd3==0.12.0`")
        if "etcd3" not in sys.modules:
            pool = descriptor_pool.DescriptorPool()
            for name in ("kv", "auth", "rpc"):  # rpc imports the others
                module = types.ModuleType(f"etcd3.etcdrpc.{name}_pb2")
                source = Path(spec.origin).with_name("etcdrpc") / f"{name}_pb2.py"
                descriptor = pool.AddSerializedFile(_serialized_descriptor(source))
                vars(module)["DESCRIPTOR"] = descriptor
                builder.BuildMessageAndEnumDescriptors(descriptor, vars(module))
                builder.BuildTopDescriptorsAndMessages(descriptor, module.__name__, vars(module))
                sys.modules[module.__name__] = module
        from etcd3 import etcdrpc
    return Api(grpc, etcdrpc)


def _serialized_descriptor(source: Path) -> bytes:
    """Return the bytes of `serialized_pb=_b('...')` in a generated module."""
    literal = re.search(r"serialized_pb=_b\(('.*')\)", source.read_text(encoding="utf-8"))
    if literal is None:
        raise NameResolveError(f"{source} contains no descriptor; asyncrl needs etcd3==0.12.0")
    return str(ast.literal_eval(literal[1])).encode("latin1")
