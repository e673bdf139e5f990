"""Everything the router raises on purpose. Each error knows its HTTP status and its name in both
dialects; the bodies are written in `protocols/*/encode.py`.

RouterError                 500  api_error
├── InvalidRequest          400  invalid_request_error; `param` names the field
│   ├── UnsupportedFeature  400  legal in the dialect, not on this model; says what to do
│   └── UpstreamRefusal     400  an upstream's own words on what the caller did wrong
├── AuthenticationFailed    401  authentication_error
├── PermissionDenied        403  permission_error
├── NotFound                404  not_found_error
│   └── ModelNotFound       404
├── MethodNotAllowed        405  invalid_request_error
├── RequestTooLarge         413  request_too_large
├── RateLimited             429  rate_limit_error; `retry_after_s` says when it can pass
├── Overloaded              529  overloaded_error
├── BackendError            500  api_error: the generation broke
│   └── BackendUnavailable  503  api_error: nothing can answer now, a retry may help
│       └── LimiterUnavailable 503  the store of the limits does not answer
└── ModelFilesError         500  api_error: a model folder's tokenizer or template cannot be used
"""

from typing import ClassVar


class RouterError(Exception):
    """`retry_after_s` is sent when a retry can help; `should_retry` overrides the SDKs' own rule.
    `details_code` is the error_code that Claude SDKs act on, where there is one."""

    status: ClassVar[int] = 500
    anthropic_type: ClassVar[str] = "api_error"
    openai_type: ClassVar[str] = "server_error"
    openai_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
        details_code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry
        self.details_code = details_code


class InvalidRequest(RouterError):
    status = 400
    anthropic_type = "invalid_request_error"
    openai_type = "invalid_request_error"


class UnsupportedFeature(InvalidRequest):
    openai_code = "unsupported_value"


class UpstreamRefusal(InvalidRequest):
    """`content` is the upstream's body: a client of the same dialect gets it as it is, with the
    upstream's status, which is any of 4xx."""

    def __init__(
        self,
        message: str,
        *,
        upstream_status: int = 400,
        content: bytes = b"",
        content_type: str = "application/json",
        param: str | None = None,
        details_code: str | None = None,
    ) -> None:
        super().__init__(message, param=param, details_code=details_code)
        self.upstream_status = upstream_status
        self.content = content
        self.content_type = content_type


class AuthenticationFailed(RouterError):
    status = 401
    anthropic_type = "authentication_error"
    openai_type = "invalid_request_error"
    openai_code = "invalid_api_key"


class PermissionDenied(RouterError):
    status = 403
    anthropic_type = "permission_error"
    openai_type = "invalid_request_error"
    openai_code = "permission_denied"


class NotFound(RouterError):
    status = 404
    anthropic_type = "not_found_error"
    openai_type = "invalid_request_error"
    openai_code = "not_found"


class ModelNotFound(NotFound):
    openai_code = "model_not_found"


class MethodNotAllowed(RouterError):
    status = 405
    anthropic_type = "invalid_request_error"
    openai_type = "invalid_request_error"
    openai_code = "method_not_allowed"


class RequestTooLarge(RouterError):
    status = 413
    anthropic_type = "request_too_large"
    openai_type = "invalid_request_error"
    openai_code = "request_too_large"


class RateLimited(RouterError):
    status = 429
    anthropic_type = "rate_limit_error"
    openai_type = "rate_limit_error"
    openai_code = "rate_limit_exceeded"


class Overloaded(RouterError):
    status = 529
    anthropic_type = "overloaded_error"
    openai_type = "server_error"
    openai_code = "overloaded"


class BackendError(RouterError):
    """The generation broke; nothing of the caller's is at fault."""


class BackendUnavailable(BackendError):
    status = 503
    openai_code = "service_unavailable"


class LimiterUnavailable(BackendUnavailable):
    """Nothing is known of what the team has left: the caller decides whether it may go on."""


class ModelFilesError(RouterError):
    """Found when a model is loaded, or when its template breaks on a conversation."""
