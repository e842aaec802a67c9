"""Gemma 3 that also reads images: its text model. An export copies the vision tower."""

from dataclasses import replace

from conf.families import gemma3_text

FAMILY = replace(
    gemma3_text.FAMILY,
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    read_as="gemma3_text",
    roots=("language_model.model.", "model.language_model.", "model."),
    copied=tuple(f"{root}{tower}." for tower in ("vision_tower", "multi_modal_projector") for root in ("", "model.")),
    releases={"google/gemma-3-4b-it": 3.9, "google/gemma-3-12b-it": 11.8, "google/gemma-3-27b-it": 27.0},
)
