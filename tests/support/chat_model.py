"""The tiny Llama of the chat tests and its tokenizers, the same wherever they are made: no file of weights is kept."""

import json
import pathlib
import struct

import numpy

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
SIZES = dict(vocab_size=640, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2)
# A large eps: with 1e-8 the rounding of tiny gradients turns the first steps of their weights.
TRAINING = dict(lr=1e-2, weight_decay=0.1, clip=0.5, betas=(0.9, 0.95), eps=1e-4)


def weights():
    """Name -> float32 array, in the order of the file."""
    width, ffn = SIZES["hidden_size"], SIZES["intermediate_size"]
    kv = width // SIZES["num_attention_heads"] * SIZES["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (SIZES["vocab_size"], width)}
    for layer in range(SIZES["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {at + "input_layernorm.weight": (width,), at + "post_attention_layernorm.weight": (width,),
                   at + "self_attn.q_proj.weight": (width, width), at + "self_attn.k_proj.weight": (kv, width),
                   at + "self_attn.v_proj.weight": (kv, width), at + "self_attn.o_proj.weight": (width, width),
                   at + "mlp.gate_proj.weight": (ffn, width), at + "mlp.up_proj.weight": (ffn, width),
                   at + "mlp.down_proj.weight": (width, ffn)}
    shapes |= {"model.norm.weight": (width,), "lm_head.weight": (SIZES["vocab_size"], width)}
    out = {}
    for number, (name, shape) in enumerate(shapes.items()):
        drawn = numpy.random.RandomState(number).standard_normal(shape)  # a stream that numpy promises not to change
        out[name] = (1 + 0.1 * drawn if len(shape) == 1 else 0.2 * drawn).astype(numpy.float32)
    return out


def tokenizer_json(name, specials):
    """One of tests/golden/tokenizers with more special tokens; tests/runtime/data/chat_test.cc makes the same."""
    spec = json.loads((GOLDEN / "tokenizers" / f"{name}.json").read_text())
    known = max(max(spec["model"]["vocab"].values()), *(token["id"] for token in spec["added_tokens"]))
    for content in specials:
        if any(token["content"] == content for token in spec["added_tokens"]):
            continue
        known += 1
        spec["added_tokens"].append({"id": known, "content": content, "single_word": False, "lstrip": False,
                                     "rstrip": False, "normalized": False, "special": True})
    return spec


def write_hf_folder(folder):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    config = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", max_position_embeddings=256,
                  rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False, torch_dtype="float32", **SIZES)
    (folder / "config.json").write_text(json.dumps(config))
    header, data = {}, b""
    for name, array in weights().items():
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_weights(folder):
    """Name -> array of a folder with one safetensors file in float32."""
    data = (pathlib.Path(folder) / "model.safetensors").read_bytes()
    size = struct.unpack_from("<Q", data)[0]
    out = {}
    for name, entry in json.loads(data[8:8 + size]).items():
        if name != "__metadata__":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            out[name] = numpy.frombuffer(data[begin:end], numpy.float32).reshape(entry["shape"])
    return out


def digest(before, after):
    """A few numbers of an update that no two different updates share: per tensor its norm and its sum by a fixed draw."""
    out = {}
    for number, (name, array) in enumerate(before.items()):
        moved = after[name].astype(numpy.float64) - array
        draw = numpy.random.RandomState(1000 + number).standard_normal(array.shape)
        out[name] = [float(f"{number:.9g}") for number in (numpy.sqrt((moved ** 2).sum()), (moved * draw).sum())]
    return out
