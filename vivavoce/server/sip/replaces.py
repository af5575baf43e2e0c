"""The Replaces header (RFC 3891), by which a call takes the place of another one: attended transfer."""

from dataclasses import dataclass
from urllib.parse import quote

from vivavoce.errors import InputError
from vivavoce.server.sip.addresses import SipAddress, Uri, split_parameters
from vivavoce.server.sip.dialog import Dialog, DialogId
from vivavoce.server.sip.messages import SipRequest


@dataclass(frozen=True)
class Replaces:
    """The dialog that is replaced, as the receiver of the header knows it."""

    dialog: DialogId
    is_early_only: bool = False

    @classmethod
    def of(cls, request: SipRequest) -> "Replaces | None":
        """The header of an INVITE; None without one. InputError where it is malformed."""
        values = [value for name, value in request.headers if name.lower() == "replaces"]
        if not values:
            return None
        call_id, _, rest = values[0].partition(";")
        parameters = split_parameters(f";{rest}")
        to_tag, from_tag = parameters.get("to-tag", ""), parameters.get("from-tag", "")
        if len(values) > 1 or not (call_id.strip() and to_tag and from_tag):
            raise InputError("the header Replaces is malformed")
        return cls((call_id.strip(), to_tag, from_tag), "early-only" in parameters)


def refer_to(dialog: Dialog) -> str:
    """The Refer-To of an attended transfer: the peer of a dialog of ours, whose place the call is to take there."""
    uri = SipAddress.parse(dialog.remote).uri if dialog.routes else dialog.target
    call_id, own, remote = dialog.id
    value = quote(f"{call_id};to-tag={remote};from-tag={own}", safe="")
    return f"<{_plain(uri)}?Replaces={value}>"


def _plain(uri: Uri) -> str:
    return uri.text.partition("?")[0]
