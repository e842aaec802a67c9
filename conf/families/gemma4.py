"""Gemma 4 that also reads images or sound: its text model. An export copies the towers."""

from dataclasses import replace

from conf.families import gemma4_text

TOWERS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio")

FAMILY = replace(
    gemma4_text.FAMILY,
    architecture="Gemma4ForConditionalGeneration",
    model_type="gemma4",
    read_as="gemma4_text",
    roots=("model.language_model.", "model."),
    copied=tuple(f"model.{tower}." for tower in TOWERS),
    releases={"google/gemma-4-26B-A4B-it": 25.2},
)
