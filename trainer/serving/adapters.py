"""Adapters of a running server: loaded and removed as its file says (contract/served_model.py), while it answers.

A request to ADAPTERS makes the server read its file again. It carries neither names nor paths, so clients cannot load
files of their choice; vLLM's own /v1/load_lora_adapter stays off.

vLLM stores keys and values of prompts by the adapter's name and would use them for other weights that get this name
later. Therefore the name inside vLLM ends with a checksum of the adapter's files.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from contract import checksums
from contract.faults import Fault, line_of
from contract.served_model import ADAPTERS, ServedAdapter, ServedModel
from trainer.patches import vllm_cpu
from trainer.serving import adapter_coverage, unmerged
from trainer.serving.unmerged import CONFIG, WEIGHTS, Adapter

ChatTemplate = tuple[str | None, dict[str, Any]]  # text, if it is not the tokenizer's, and default options


class Loaded(NamedTuple):
    """An adapter in vLLM."""

    adapter: ServedAdapter
    request: Any  # vLLM's LoRARequest
    template: ChatTemplate


def read(adapter: ServedAdapter, model: Path) -> Adapter:
    """The adapter with the name that vLLM gets, or a Fault if vLLM would serve it wrongly."""
    folder = Path(adapter.folder)
    content = [checksums.of_file(folder / name) for name in (CONFIG, WEIGHTS)]
    found = unmerged.read(folder, f"{adapter.names[0]}:{checksums.of(' '.join(content))[:16]}")
    adapter_coverage.require_whole(folder, model)
    return found


def require_room(adapter: Adapter, sized: Adapter | None, gpus: int) -> None:
    """Raise a Fault for a rank or layers for which the server reserved no memory at its start."""
    if sized is None:
        raise Fault(f"{adapter.folder}: the server has a merged model and no memory for adapters")
    again = "start the server with this adapter"
    if adapter.rank > sized.room(gpus):
        raise Fault(f"{adapter.folder}: rank {adapter.rank}, but the server has memory for {sized.room(gpus)}; {again}")
    if others := sorted(adapter.layers - sized.layers):
        known = ", ".join(sorted(sized.layers))
        raise Fault(f"{adapter.folder}: adapts {', '.join(others)}, but the server has memory for {known}; {again}")


def install(file: Path, stamp: str, sized: Adapter | None, gpus: int, template: Callable[[Path], ChatTemplate]) -> None:
    """Make vLLM's server follow its file, and show the stamp of its model.

    `sized` has the rank and the layers of adapters for which there is memory.
    """
    vllm_cpu.require_known()
    from starlette.responses import JSONResponse
    from vllm.entrypoints.openai import api_server
    from vllm.entrypoints.openai.engine.protocol import ModelCard
    from vllm.lora.request import LoRARequest

    server: Any = api_server  # its own names, which it does not export
    templates: dict[str, ChatTemplate] = {}  # by the name in requests

    class Adapters(server.OpenAIServingModels):
        def __init__(self, *args: Any, **keys: Any) -> None:
            super().__init__(*args, **keys)
            self.loaded: dict[str, Loaded] = {}  # by the name in vLLM
            self.following = asyncio.Lock()
            self.number = 0

        async def init_static_loras(self) -> None:
            await self.follow()

        async def follow(self) -> None:
            """Load and remove adapters until the server has those of its file."""
            async with self.following:
                settings = ServedModel.read(file)
                wanted = {}
                for adapter in settings.adapters:
                    found = await asyncio.to_thread(read, adapter, Path(settings.model))
                    require_room(found, sized, gpus)
                    known = self.loaded.get(found.name)
                    wanted[found.name] = known._replace(adapter=adapter) if known else await self._load(adapter, found)
                before, self.loaded = self.loaded, wanted
                named = {name: one for one in wanted.values() for name in one.adapter.names}
                self.lora_requests = {name: one.request for name, one in named.items()}
                templates.clear()
                templates.update({name: one.template for name, one in named.items()})
                for name in before.keys() - wanted.keys():
                    await self.engine_client.remove_lora(before[name].request.lora_int_id)

        async def _load(self, adapter: ServedAdapter, found: Adapter) -> Loaded:
            own = await asyncio.to_thread(template, Path(adapter.data))
            self.number += 1
            request = LoRARequest(found.name, self.number, adapter.folder, is_3d_lora_weight=found.experts)
            try:
                await self.engine_client.add_lora(request)
            except Exception as error:  # vLLM passes on any exception of its worker
                raise Fault(f"{adapter.folder}: vLLM refuses it: {' '.join(str(error).split())[:300]}") from None
            return Loaded(adapter, request, own)

        def model_name(self, lora_request: Any = None) -> str:
            return self.loaded[lora_request.lora_name].adapter.names[0] if lora_request else super().model_name()

        async def show_available_models(self) -> Any:
            models = await self.registry.show_available_models()
            base = models.data[0].id
            models.data[0] = ModelCard(**models.data[0].model_dump() | {"stamp": stamp})
            for name, request in self.lora_requests.items():
                models.data.append(ModelCard(id=name, root=request.lora_path, parent=base))
            return models

    class Renderer(server.OnlineRenderer):
        async def preprocess_chat(self, request: Any, messages: list[Any], **keys: Any) -> Any:
            if own := templates.get(request.model):
                keys |= {"default_template": own[0], "default_template_kwargs": own[1]}
            return await super().preprocess_chat(request, messages, **keys)

    async def follow(request: Any) -> Any:
        try:
            await request.app.state.openai_serving_models.follow()
        except (Fault, OSError) as error:
            return JSONResponse({"refused": line_of(error) or str(error)}, 409)
        return JSONResponse({})

    build_app = server.build_app

    def with_route(*args: Any, **keys: Any) -> Any:
        app = build_app(*args, **keys)
        app.add_route(ADAPTERS, follow, ["POST"])
        return app

    server.OpenAIServingModels, server.OnlineRenderer, server.build_app = Adapters, Renderer, with_route
