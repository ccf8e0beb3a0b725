"""Service of a pair with the options of `serve`: checks, models, application, and start in this process."""

from __future__ import annotations

import argparse
import os
import socket
import ssl
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from specdemo.cli.arguments import checked_recipe, given, with_pair_settings
from specdemo.completions.routes import add_completions
from specdemo.completions.service import CompletionService
from specdemo.core.errors import UserError
from specdemo.models.model_pool import ModelPool
from specdemo.recipe import Recipe, plan_run
from specdemo.remote.access import TOKEN, bind, is_loopback, read_token
from specdemo.remote.admission import ConnectionLimits, ServiceOptions
from specdemo.remote.contexts import ObserveStep
from specdemo.remote.protocol import MAX_REPLICA
from specdemo.remote.server import listen, serve_model

MAX_DRAIN_S, RAY_DRAIN_S = 3600, 60


def serve_here(options: argparse.Namespace) -> None:
    """Serve in this process until a signal arrives, with checked options."""
    with closing(bind(options.host, options.port)) as listener:
        port = listener.getsockname()[1]
        listen(
            build_service(options, f"{socket.gethostname()}:{port}"),
            listener,
            options.certificate,
            options.key,
            sys.stdin.buffer if options.until_stdin_ends else None,
            announce=lambda: announce_address(options, port),
            connections=ConnectionLimits(options.connections, options.client_connections),
            drain_s=options.drain_s,
        )


def announce_address(options: argparse.Namespace, port: int) -> None:
    scheme = "https" if options.certificate else "http"
    print(f"listening on {scheme}://{options.host}:{port}", flush=True)


def check_options(options: argparse.Namespace) -> None:
    """Raise `UserError` for values out of range, missing files and options without effect; warn without a token."""
    if options.drain_s is None:
        options.drain_s = RAY_DRAIN_S if options.ray else 0
    if not (options.body_mb > 0 and options.rate >= 0 and 0 <= options.drain_s <= MAX_DRAIN_S):
        raise UserError(f"body-mb must be above 0, rate at least 0, and drain-s from 0 to {MAX_DRAIN_S}")
    _check_certificate(options.certificate, options.key)
    if not options.ray and (options.min_replicas, options.max_replicas) != (1, 1):
        raise UserError("min-replicas and max-replicas have no effect without --ray: add it")
    limits = ConnectionLimits()
    if options.ray and (options.connections, options.client_connections) != (limits.total, limits.per_visitor):
        raise UserError("connections and client-connections have no effect with --ray: omit them")
    if options.min_replicas > options.max_replicas:
        raise UserError(
            f"min-replicas must be from 1 to max-replicas, not {options.min_replicas} of {options.max_replicas}"
        )
    if read_token(os.environ) is None and not is_loopback(options.host):
        print(f"clients of {options.host} need no authentication: set {TOKEN} to require a token", file=sys.stderr)


def _check_certificate(certificate: Path | None, key: Path | None) -> None:
    if certificate is None:
        if key is not None:
            raise UserError("key has no effect without --certificate: add it")
        return
    encrypted = False

    def passphrase() -> str:
        nonlocal encrypted
        encrypted = True  # OpenSSL requests the passphrase later
        return ""

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, passphrase)
    except OSError as error:
        if not encrypted:
            raise UserError(
                f"certificate {certificate} with key {key or certificate} is unusable ({error.strerror}): give a "
                "certificate and its private key as PEM files"
            ) from error


def served_recipe(flags: Mapping[str, Any]) -> Recipe:
    """Return the defaults of completions: those of `run`, or n-grams for a target without draft model and head."""
    if "target" not in flags:
        values = with_pair_settings(flags)
    else:
        single = not flags.keys() & {"drafter", "head"}
        values = {"method": "nasd" if single else "hybrid" if "head" in flags else "draft", **flags}
    return checked_recipe(values, flags.keys() - {"max_tokens"})


def build_service(options: argparse.Namespace, replica: str, observe: ObserveStep | None = None) -> FastAPI:
    """Load the models and return the application of the service `replica`; each step calls `observe`."""
    recipe, pool = served_recipe(given(options)), ModelPool()
    plan = plan_run(recipe)
    target = pool.get(plan.target)
    if target.encoder:
        raise UserError("models with an encoder cannot be served: use run")
    for _ in pool.ensure_loaded([*plan.models.values()], head=plan.head):
        pass
    if plan.head is not None:
        pool.get_head(plan.head)
    service_options = ServiceOptions(
        token=read_token(os.environ),
        local=is_loopback(options.host),
        origins=options.allow_origin,
        body_bytes=int(options.body_mb * (1 << 20)),
        requests_per_second=options.rate,
        budget_bytes=options.budget_mb << 20,
        max_contexts=options.contexts,
        expiry_s=options.expiry_s,
        waiting=options.queue,
        texts=options.batch,
    )
    app = serve_model(target, service_options, pool.hub, replica[:MAX_REPLICA])
    if observe is not None:
        app.state.contexts.observe = observe
    add_completions(app, CompletionService(pool, recipe))
    return app
