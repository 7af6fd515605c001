"""The ingress middleware: what every HTTP request passes before the platform works on it.

Plain ASGI around the application::

    request id ─ CORS ─ errors ─ deadline ─ authentication ─ SLO header ─ limits ─ body ─► app

What the application finds in ``scope["state"]`` (``request.state``):

=============  ==========================================================================
``request_id``  str; also in the request's headers, and echoed on every response
``api_key``     :class:`~loomserve.platform.config.ApiKey`, or None where none is needed
``slo_ms``      float, milliseconds from the ``x-slo-ms`` header, or None
``body``        bytes, the whole request body (empty for methods without one); None where the
               application reads it itself
=============  ==========================================================================
"""

from loomserve.platform.http.ingress.middleware import ingress_middleware
from loomserve.platform.http.ingress.responses import exception_handlers, respond

__all__ = ["exception_handlers", "ingress_middleware", "respond"]
