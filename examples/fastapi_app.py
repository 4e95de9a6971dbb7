"""dtorch in a FastAPI application: uvicorn --app-dir examples fastapi_app:app

    POST /predict  {"rows": [[1.0, 2.0, 3.0]]}    {"outputs": [[...]]}
    GET  /health   200 {"healthy": true}, or 503 with the reason

Workers start with the application and end with it. Requests run on one event loop and wait for no other's: ops are recorded
in passing, values are awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

import dtorch

NUM_FEATURES = 3


class Rows(BaseModel):
    rows: list[list[float]]


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).requires_grad_(False)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
    """Start the workers and put the model on them. What is yielded is each request's state."""
    session = await asyncio.to_thread(dtorch.init)  # which waits for nothing of this loop, but takes a moment
    mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    yield {"session": session, "model": dtorch.distribute(make_model(), mesh, "auto")}
    await asyncio.to_thread(dtorch.shutdown)


app = FastAPI(lifespan=lifespan)


@app.post("/predict")
async def predict(rows: Rows, request: Request) -> dict[str, list[list[float]]]:
    if not rows.rows or any(len(row) != NUM_FEATURES for row in rows.rows):
        raise HTTPException(422, f"rows of {NUM_FEATURES} numbers are expected")
    return {"outputs": (await request.state.model(torch.tensor(rows.rows))).tolist()}


@app.get("/health")
async def health(request: Request) -> JSONResponse:
    try:
        request.state.session.check_open()
    except dtorch.DTorchError as error:
        return JSONResponse({"healthy": False, "reason": str(error)}, status_code=503)
    return JSONResponse({"healthy": True})
