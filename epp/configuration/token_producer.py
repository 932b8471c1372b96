"""Configuration of `token-producer`: the source of prompts' token ids, and the time that requests
wait for them.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Literal
from urllib.parse import urlsplit

from msgspec import Meta, field

from epp.core.abilities import Abilities
from epp.core.duration import Duration, check_above_zero
from epp.core.labels import Selector
from epp.core.parameters import Parameters
from epp.core.types import Endpoint

PORT_MAX: Final = 65_535


class RenderMode(StrEnum):
    """The way in which the picker requests token ids for Anthropic messages or OpenAI responses,
    which older engines do not render.
    """

    AUTO = "auto"
    """Request token ids at the render path of the API if the engine has one. Otherwise the Anthropic
    messages or OpenAI responses have no token ids.
    """
    NATIVE = "native"
    LEGACY = "legacy"


class PortRule(Parameters, frozen=True):
    """Port of the renderer of endpoints: those that `selector` selects render at `base_port` plus
    the number of their rank.
    """

    base_port: Annotated[int, Meta(ge=1, le=PORT_MAX)]
    selector: Selector = field(default_factory=Selector)


class LoadBalancer(Parameters, frozen=True):
    type: Literal["round-robin"] = "round-robin"


class EndpointDiscovery(Parameters, frozen=True):
    """Settings for rendering prompts by the endpoints of the pool, round robin, with one retry at
    another endpoint.
    """

    port_rules: tuple[PortRule, ...] = ()
    """Rules for the port at which an endpoint renders; the first rule that selects it applies. An
    endpoint that no rule selects does not render.

    Without rules, every endpoint renders at the port that serves requests.
    """
    load_balancer: LoadBalancer = field(default_factory=LoadBalancer)
    """Distribution of render requests over endpoints; only `round-robin` is supported."""
    attempt_timeout: Duration | None = None
    """Timeout of each of at most two attempts to render a prompt. If it is None, both attempts
    together have the timeout of the render request.
    """
    discover_model_limits: bool = False
    """True to discover the prompt length that each endpoint can render; only `false` is supported.
    """
    min_model_len: Annotated[int, Meta(ge=0)] = 0
    """Minimum number of tokens that an endpoint must be able to render; endpoints with less do not
    render.
    """
    context_limit_label: str = ""
    """Label of endpoints that holds the number of tokens that they can render. Endpoints without a
    valid value do not render.

    Empty if all endpoints can render.
    """

    def __post_init__(self) -> None:
        if self.attempt_timeout is not None:
            check_above_zero("attemptTimeout", self.attempt_timeout)
        if self.discover_model_limits:
            raise ValueError(
                "discoverModelLimits is not supported, because renderers are not asked for their "
                "limits: set contextLimitLabel"
            )
        if self.min_model_len and not self.context_limit_label:
            raise ValueError(
                "minModelLen needs contextLimitLabel, which holds the limits of renderers"
            )

    def port_of(self, endpoint: Endpoint, rank: int) -> int | None:
        """Return the port at which `endpoint`, the rank `rank` (from 0) of its pod, renders
        prompts. Return None if it must not render, or if its port would be above `PORT_MAX`.
        """
        if self.context_limit_label:
            limit = endpoint.labels.get(self.context_limit_label, "")
            if not (limit.isascii() and limit.isdigit() and int(limit[:18]) > 0):
                return None
            if int(limit[:18]) < self.min_model_len:
                return None
        if not self.port_rules:
            return endpoint.port
        for rule in self.port_rules:
            if rule.selector.matches(endpoint.labels):
                port = rule.base_port + rank
                return port if port <= PORT_MAX else None
        return None


class VllmRenderer(Parameters, frozen=True):
    """Settings for rendering prompts by vLLM's render and tokenize API."""

    url: str = "http://localhost:8000"
    """URL of the renderer, to which the path of an API is appended."""
    timeout: Duration = Duration(5.0)
    """Timeout of a request to the renderer for a completion's prompt.

    The client's request waits for the answer at most `tokenizeTimeout`.
    """
    mm_timeout: Duration = Duration(30.0)
    """Timeout of a request to the renderer for chats, messages and responses; `timeout` applies if
    it is longer.
    """
    messages_render_mode: RenderMode = RenderMode.AUTO
    """Rendering of the prompts of Anthropic messages: at the API's own path, or not at all with
    `legacy`.
    """
    responses_render_mode: RenderMode = RenderMode.AUTO
    """Rendering of the prompts of OpenAI responses: at the API's own path, or not at all with
    `legacy`.
    """
    endpoint_discovery: EndpointDiscovery | None = None
    """Settings for rendering by the endpoints of the pool. If None, the renderer at `url` renders.
    """
    prefill_only: bool = False
    """True to set the output limit in render requests to one token, whatever limit the
    client set.
    """
    omit_mm_kwargs: bool = field(default=True, name="omitMMKwargs")
    """True to ask the renderer to omit the tensors that it makes of images and other media."""
    ca_cert_path: str = ""
    """PEM file of the authority that signed the renderer's certificate.

    If empty, the system's authorities apply.
    """
    client_cert_path: str = ""
    """PEM file of the certificate that the picker presents to renderers that request one."""
    client_key_path: str = ""
    """PEM file of the private key of the certificate that the picker presents."""
    insecure_skip_verify: bool = False
    """True to accept any certificate of the renderer."""

    def __post_init__(self) -> None:
        check_above_zero("timeout", self.timeout)
        check_above_zero("mmTimeout", self.mm_timeout)
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
        except ValueError:
            known = False
        if not known or parts.query or parts.fragment or parts.username is not None:
            raise ValueError(f"url is {self.url!r}; expected one such as http://renderer:8000")
        if bool(self.client_cert_path) != bool(self.client_key_path):
            raise ValueError("clientCertPath and clientKeyPath must be given together")
        files = (self.ca_cert_path, self.client_cert_path)
        if self.endpoint_discovery is not None and (any(files) or self.insecure_skip_verify):
            raise ValueError(
                "endpoints found by endpointDiscovery render by http: remove caCertPath, "
                "clientCertPath, clientKeyPath and insecureSkipVerify, or endpointDiscovery"
            )


class ContentFormat(StrEnum):
    """Form in which a chat template receives content of several parts, as in vLLM's
    `--chat-template-content-format`.
    """

    AUTO = "auto"
    STRING = "string"
    OPENAI = "openai"


class LocalTokenizers(Parameters, frozen=True):
    """Settings for rendering prompts in the picker, from mounted tokenizer files.

    The files are `tokenizer.json`, `tokenizer_config.json` and, if the chat template is not in the
    latter, `chat_template.jinja` or `chat_template.json`.
    """

    auto_discovery_dir: str = ""
    """Folder to search for tokenizers. A `tokenizer.json` in a folder below it belongs to the model
    that the relative path of that folder names, or, in the layout of the Hugging Face cache, to the
    model of that cache. A `tokenizer.json` in the searched folder itself belongs to the model with
    the name of this folder.
    """
    model_tokenizer_map: Mapping[str, str] = field(default_factory=dict)
    """Tokenizer file of each model, or the folder that contains it, by model name."""
    chat_template_content_format: ContentFormat = ContentFormat.AUTO
    """Form in which the chat template receives content of several parts, as in vLLM's
    `--chat-template-content-format`.
    """
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Additional variables of the chat template. Values that the request gives take precedence."""

    def __post_init__(self) -> None:
        if not (self.auto_discovery_dir or self.model_tokenizer_map):
            raise ValueError("local needs autoDiscoveryDir or modelTokenizerMap")


class Backend(StrEnum):
    """Source of prompts' token ids: an estimate by length, the engine's renderer, or tokenizer
    files.
    """

    ESTIMATE = "estimate"
    VLLM = "vllm"
    LOCAL = "local"


class TokenProducer(Parameters, frozen=True):
    """Source of prompts' token ids: an estimate of 4 bytes per token (`estimate`), the engine's
    renderer (`vllm`), or tokenizer files (`local`).

    A request waits for its token ids at most `tokenize_timeout`. The picker routes the request by
    the bytes of its prompt after that time, or at once if its token ids cannot be determined.
    """

    abilities: ClassVar[Abilities] = Abilities(warns=True)
    refused: ClassVar[Mapping[str, str]] = {
        "uds_tokenizer_config": "udsTokenizerConfig tokenizer backend is not supported: use "
        "`vllm`, the renderer, or `local`",
        "hf": "hf tokenizer backend is not supported, because the picker loads nothing from a "
        "hub: use `local` with mounted files",
    }

    model_name: str = ""
    """Name of the model whose tokenizer `local` uses for models without a tokenizer of their own,
    such as adapters. Without any backend, a name here selects `vllm` with its defaults.
    """
    tokenize_timeout: Duration = Duration(0.02)
    estimate: Mapping[str, Any] | None = None
    vllm: VllmRenderer | None = None
    local: LocalTokenizers | None = None
    uds_tokenizer_config: Any = None
    hf: Any = None

    def __post_init__(self) -> None:
        for member, why in self.refused.items():
            if getattr(self, member) is not None:
                raise ValueError(f"the {why}")
        check_above_zero("tokenizeTimeout", self.tokenize_timeout)
        given = [b.value for b in Backend if getattr(self, b.value) is not None]
        if len(given) > 1:
            raise ValueError(f"has the backends {' and '.join(given)}; expected only one")

    @property
    def backend(self) -> Backend:
        if self.local is not None:
            return Backend.LOCAL
        if self.vllm is not None or (self.model_name and self.estimate is None):
            return Backend.VLLM
        return Backend.ESTIMATE

    @property
    def renderer(self) -> VllmRenderer:
        """Return the settings of the backend `vllm`, which are the defaults if it is not
        configured.
        """
        return self.vllm or VllmRenderer()

    def warnings(self) -> list[str]:
        """Return one sentence for each parameter that has no effect or an unexpected one; the
        caller adds its place in the document.
        """
        found: list[str] = []
        if self.estimate:
            found.append(
                "parameters of `estimate` have no effect, because a token counts as 4 bytes"
            )
        if self.backend is not Backend.VLLM:
            return found
        renderer = self.renderer
        if self.vllm is None:
            found.append(
                f"modelName alone selects the renderer at {renderer.url}: set `vllm.url`, or "
                "`estimate: {}` to measure prompts by their bytes"
            )
        if RenderMode.LEGACY in {renderer.messages_render_mode, renderer.responses_render_mode}:
            found.append(
                "render mode legacy has no effect, because the tokens of another API are not the "
                "engine's: such requests are placed by their bytes"
            )
        if "${" in self.model_name or "${" in renderer.url:
            found.append("has a literal ${, which is not replaced")
        return found
