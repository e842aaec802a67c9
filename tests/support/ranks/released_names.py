"""Released names, and the number of numbers, that Megatron-Bridge has for each tiny model: one line of JSON.

python -m tests.support.ranks.released_names
"""

import contextlib
import json

from conf import families
from trainer.rehearsal import meta_model


def main() -> None:
    meta_model.prepare()
    from tests.support.drawn_models import make_run

    run = make_run(train={"global_batch": 8, "steps": 1}, adapter={"kind": "none"})
    print(json.dumps({kind: names(run, config) for kind, config in families.tiny().items()}))


def names(run, config) -> tuple[list[str], int]:
    from trainer.weights import coverage, mapping

    with meta_model._world(run, 0), meta_model._on_meta(), contextlib.redirect_stdout(None):
        chunks, _ = meta_model._build(run, config)
        registry = meta_model.open_bridge(config)._model_bridge.mapping_registry()
        found, count = set(), 0
        for name, tensor in coverage.named_tensors(chunks):
            found |= {*mapping.released_names(registry.megatron_to_hf_lookup(name))}
            count += tensor.numel()
    return sorted(found), count


if __name__ == "__main__":
    main()
