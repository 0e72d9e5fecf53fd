"""/v1/responses: create, retrieve, delete and cancel."""

from __future__ import annotations

import json
from weakref import WeakValueDictionary

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from baton.api.compaction import CompactAnswer, CompactRequest, bound, compact_start
from baton.api.field_names import RESPONSES
from baton.api.http_requests import BodyReader, grammar_field, name_dropped, running, unread_arguments
from baton.api.openai_answers import RequestBatch
from baton.api.openai_errors import ApiError
from baton.api.openai_fields import Json
from baton.api.response_store import ResponseStore, StoredResponse
from baton.api.responses_answers import ResponseAnswer
from baton.api.responses_items import InputItem, OutputItems, ReferenceItem, input_messages
from baton.api.responses_protocol import ConversationRequest, ResponsesRequest, response_start
from baton.api.typed_events import respond
from baton.gateway.gateway import Gateway
from baton.gateway.tool_grammars import unenforced
from baton.v1 import inference_pb2, tokenizer_pb2


def add_responses(app: FastAPI, gateway: Gateway, bodies: BodyReader) -> None:
    """Adds the routes. What is stored belongs to the API key that made it."""
    config = gateway.config
    store = ResponseStore(config.response_store_mib * 2**20, config.response_store_seconds)
    under_way: WeakValueDictionary[tuple[bytes, str], RequestBatch] = WeakValueDictionary()

    def find(id: str, owner: bytes) -> StoredResponse:
        found = store.get(id, owner)
        if found is None:
            text = f"response {id[:80]!r} is not stored here"
            raise ApiError(404, text, "response_id", "response_not_found")
        return found

    def earlier(body: ConversationRequest, owner: bytes) -> list[tokenizer_pb2.ChatMessage]:
        previous = body.previous_response_id
        if previous is None:
            return []
        found = store.get(previous, owner)
        if found is None:
            text = f"previous_response_id {previous[:80]!r} is not stored here: send its items as input"
            raise ApiError(404, text, "previous_response_id", "previous_response_not_found")
        if found.conversation is None:
            text = f"previous_response_id {previous[:80]!r} has failed: nothing can follow it"
            raise ApiError(400, text, "previous_response_id", "previous_response_failed")
        return found.conversation

    def resolved(asked: list[InputItem], owner: bytes) -> list[InputItem]:
        """With what references name in their place, where it is stored here; each item once. An item's id has
        that of its response."""
        items: list[InputItem] = []
        stored: dict[str, dict[str, Json]] = {}
        for item in asked:
            if not isinstance(item, ReferenceItem):
                items.append(item)
                continue
            id = f"resp_{''.join(item.id.split('_')[1:2])}"
            if id not in stored:
                found = store.get(id, owner)
                output = json.loads(found.response)["output"] if found is not None else ()
                stored[id] = {each["id"]: each for each in output}
            named = stored[id].pop(item.id, None)
            items += [item] if named is None else OutputItems.validate_python([named])
        return items

    @app.post("/v1/responses")
    async def create(request: Request) -> Response:
        owner = request.state.api_key.owner

        def starts(body: ResponsesRequest) -> list[inference_pb2.GenerateStart]:
            if isinstance(body.input, list):
                body.input = resolved(body.input, owner)
            return [response_start(body, earlier(body, owner))]

        body = await bodies.read_starts(request, ResponsesRequest, starts)
        asked, ignored = body.request, body.ignored | unenforced(body.made[0].chat)
        if unread_arguments(gateway, body.made[0].chat):
            ignored.add("reasoning.effort")
        if any(isinstance(item, ReferenceItem) for item in asked.input):
            ignored.add("input.item_reference")
        if asked.has_unread_summary:
            ignored.add("input.summary")

        def keep(response: Json, message: tokenizer_pb2.ChatMessage | None) -> None:
            gone_on = under_way.get((owner, id), job) is not job  # by another call, which keeps it
            if not gone_on:
                under_way.pop((owner, id), None)
            if gone_on or asked.store is False or not store.max_bytes:
                response["store"] = False
                return
            said = None
            if message is not None and (seen := job.conversation) is not None:  # has images, by digest
                said = [*seen[bool(asked.instructions) :], message]
            elif message is not None:
                said = [*earlier_messages, *input_messages(asked.input), message]
            made = json.dumps(response, ensure_ascii=False).encode()
            response["store"] = store.put(id, made, said, owner)

        earlier_messages = earlier(asked, owner) if asked.store is not False else []
        grammar = grammar_field(body.made[0], RESPONSES.grammar)
        async with running(gateway, body.made, request, grammar) as job:
            id = f"resp_{job.name}"
            answer = ResponseAnswer(asked, id, keep)
            if asked.stream:  # else nobody knows its name before it has ended
                under_way[owner, id] = job
            limit = "max_output_tokens" if asked.max_output_tokens is not None else None
            made = await respond(job, answer, bool(asked.stream), ignored, limit)
            return name_dropped(made, body.dropped, job.name)

    @app.api_route("/v1/responses/{id}", methods=["GET", "HEAD"])
    async def retrieve(id: str, request: Request) -> Response:
        found = find(id, request.state.api_key.owner)
        return Response(found.response, media_type="application/json")

    @app.delete("/v1/responses/{id}")
    async def delete(id: str, request: Request) -> Response:
        find(id, request.state.api_key.owner)
        store.delete(id, request.state.api_key.owner)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    @app.post("/v1/responses/compact")
    async def compact(request: Request) -> Response:
        owner = request.state.api_key.owner

        def starts(body: CompactRequest) -> list[inference_pb2.GenerateStart]:
            if isinstance(body.input, list):
                body.input = resolved(body.input, owner)
            return [compact_start(body, earlier(body, owner))]

        body = await bodies.read_starts(request, CompactRequest, starts)
        await bound(gateway, body.made[0], request.state.api_key)
        async with running(gateway, body.made, request) as job:
            return await respond(job, CompactAnswer(body.made[0]), False, set(body.ignored), None)

    @app.post("/v1/responses/{name}")
    async def unknown(name: str) -> Response:
        raise ApiError(404, f"POST /v1/responses/{name[:80]} is not served here", None, "not_found")

    @app.post("/v1/responses/{id}/cancel")
    async def cancel(id: str, request: Request) -> Response:
        job = under_way.get((request.state.api_key.owner, id))
        if job is None:
            stored = find(id, request.state.api_key.owner)
            text = f"response {id} has ended: {json.loads(stored.response)['status']}"
            raise ApiError(400, text, "response_id", "response_ended")
        job.cancel("cancelled by the client")
        return JSONResponse({"id": id, "object": "response", "status": "cancelled"})
