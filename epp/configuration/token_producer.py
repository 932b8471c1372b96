"""`token-producer`: who says which tokens a prompt becomes, and how long requests wait for it."""

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
    """How requests of an API are rendered that older engines know no rendering of."""

    AUTO = "auto"
    """At its own path, where the engine has one."""
    NATIVE = "native"
    LEGACY = "legacy"


class PortRule(Parameters, frozen=True):
    """Endpoints that `selector` selects render at `base_port` plus the number of their rank."""

    base_port: Annotated[int, Meta(ge=1, le=PORT_MAX)]
    selector: Selector = field(default_factory=Selector)


class LoadBalancer(Parameters, frozen=True):
    type: Literal["round-robin"] = "round-robin"


class EndpointDiscovery(Parameters, frozen=True):
    """The endpoints of the pool render: each in turn, and once more another where one fails."""

    port_rules: tuple[PortRule, ...] = ()
    """The first that selects an endpoint says its port; (): the port that serves requests."""
    load_balancer: LoadBalancer = field(default_factory=LoadBalancer)
    """Only `round-robin`."""
    attempt_timeout: Duration | None = None
    """Of each of two attempts; none: of both together."""
    discover_model_limits: bool = False
    """Only `false` is supported."""
    min_model_len: Annotated[int, Meta(ge=0)] = 0
    """Endpoints that render fewer tokens are not asked."""
    context_limit_label: str = ""
    """Label that says how many tokens an endpoint renders; without it an endpoint is not asked."""

    def __post_init__(self) -> None:
        if self.attempt_timeout is not None:
            check_above_zero("attemptTimeout", self.attempt_timeout)
        if self.discover_model_limits:
            raise ValueError(
                "discoverModelLimits is not supported, renderers are not asked for their limits: "
                "give contextLimitLabel"
            )
        if self.min_model_len and not self.context_limit_label:
            raise ValueError("minModelLen needs contextLimitLabel, which says what renderers can")

    def port_of(self, endpoint: Endpoint, rank: int) -> int | None:
        """Where `endpoint`, the `rank`-th of its pod, renders; None: nowhere."""
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
    """The render and tokenize API of vLLM."""

    url: str = "http://localhost:8000"
    """Of the one renderer, without the path of an API."""
    timeout: Duration = Duration(5.0)
    """Of a completion's question; what the picker waits is `tokenizeTimeout`."""
    mm_timeout: Duration = Duration(30.0)
    """The same of chats, messages and responses, where it is longer."""
    messages_render_mode: RenderMode = RenderMode.AUTO
    """How Anthropic messages are rendered: at their own path, or with `legacy` not at all."""
    responses_render_mode: RenderMode = RenderMode.AUTO
    """The same of Responses."""
    endpoint_discovery: EndpointDiscovery | None = None
    """The endpoints of the pool render, in the place of `url`."""
    prefill_only: bool = False
    """Ask the renderer for one token of output, whatever the client wants."""
    omit_mm_kwargs: bool = field(default=True, name="omitMMKwargs")
    """Ask for prompts with media without the tensors that the renderer made of them."""
    ca_cert_path: str = ""
    """PEM of the authority that vouches for the renderer; none: the system's."""
    client_cert_path: str = ""
    """PEM of the picker's own certificate, where the renderer asks for one."""
    client_key_path: str = ""
    """Its private key."""
    insecure_skip_verify: bool = False
    """Trust whoever answers."""

    def __post_init__(self) -> None:
        check_above_zero("timeout", self.timeout)
        check_above_zero("mmTimeout", self.mm_timeout)
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
        except ValueError:
            known = False
        if not known or parts.query or parts.fragment or parts.username is not None:
            raise ValueError(f"url {self.url!r} is not one such as http://renderer:8000")
        if bool(self.client_cert_path) != bool(self.client_key_path):
            raise ValueError("clientCertPath and clientKeyPath need each other")
        files = (self.ca_cert_path, self.client_cert_path)
        if self.endpoint_discovery is not None and (any(files) or self.insecure_skip_verify):
            raise ValueError(
                "endpoints that are discovered render by http: remove caCertPath, clientCertPath, "
                "clientKeyPath and insecureSkipVerify, or give url"
            )


class ContentFormat(StrEnum):
    """What a chat template gets for a content of several parts: `--chat-template-content-format`."""

    AUTO = "auto"
    STRING = "string"
    OPENAI = "openai"


class LocalTokenizers(Parameters, frozen=True):
    """Files of tokenizers that are mounted: `tokenizer.json`, `tokenizer_config.json` and, where the
    template is not in it, `chat_template.jinja`.
    """

    auto_discovery_dir: str = ""
    """Each folder below it that has a `tokenizer.json` is the model of its path."""
    model_tokenizer_map: Mapping[str, str] = field(default_factory=dict)
    """Model -> folder, or file."""
    chat_template_content_format: ContentFormat = ContentFormat.AUTO
    """What the template gets for contents of several parts, as `--chat-template-content-format` has it."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """What the template gets besides; a request's own go before."""

    def __post_init__(self) -> None:
        if not (self.auto_discovery_dir or self.model_tokenizer_map):
            raise ValueError("local needs autoDiscoveryDir or modelTokenizerMap")


class Backend(StrEnum):
    """Who says which tokens a prompt becomes."""

    ESTIMATE = "estimate"
    VLLM = "vllm"
    LOCAL = "local"


class TokenProducer(Parameters, frozen=True):
    """Which tokens a prompt becomes: by its bytes, 4 a token (`estimate`), by the engine's renderer
    (`vllm`), or by tokenizers of files (`local`).

    A request waits for it at most `tokenize_timeout`, and is then placed by its bytes; so it is,
    without a wait, where the tokens cannot be had.
    """

    abilities: ClassVar[Abilities] = Abilities(warns=True)
    refused: ClassVar[Mapping[str, str]] = {
        "uds_tokenizer_config": "udsTokenizerConfig tokenizer backend is not supported: use `vllm`, "
        "the renderer, or `local`",
        "hf": "hf tokenizer backend is not supported, nothing is loaded from a hub: use `local` with "
        "files that are mounted",
    }

    model_name: str = ""
    """With `local`: whose tokenizer models have that have none of their own, such as adapters."""
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
            raise ValueError(f"has the backends {' and '.join(given)}, expected one")

    @property
    def backend(self) -> Backend:
        if self.local is not None:
            return Backend.LOCAL
        if self.vllm is not None or (self.model_name and self.estimate is None):
            return Backend.VLLM
        return Backend.ESTIMATE

    @property
    def renderer(self) -> VllmRenderer:
        """Of the backend `vllm`."""
        return self.vllm or VllmRenderer()

    def warnings(self) -> list[str]:
        """What has no effect or another than one may think, without the place."""
        found: list[str] = []
        if self.estimate:
            found.append("parameters of `estimate` have no effect, a token is 4 bytes")
        if self.backend is not Backend.VLLM:
            return found
        renderer = self.renderer
        if self.vllm is None:
            found.append(
                f"modelName alone asks the renderer at {renderer.url}: give `vllm.url`, or "
                "`estimate: {}` to measure prompts by their bytes"
            )
        if RenderMode.LEGACY in {renderer.messages_render_mode, renderer.responses_render_mode}:
            found.append(
                "render mode legacy has no effect, the tokens of another API are not the engine's: "
                "such requests are placed by their bytes"
            )
        if "${" in self.model_name or "${" in renderer.url:
            found.append("has a literal ${, which nothing here replaces")
        return found
