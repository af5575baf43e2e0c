"""Dialogs (RFC 3261, section 12): the state that the requests of one call share."""

from dataclasses import dataclass, field

from vivavoce.server.sip.addresses import Destination, SipAddress, Uri, host_port
from vivavoce.server.sip.messages import Headers, SipRequest, SipResponse, new_branch, new_tag
from vivavoce.server.sip.transport import Flow

MAX_FORWARDS = "70"

DialogId = tuple[str, str, str]
"""Call-ID, our tag and the peer's."""


@dataclass
class Dialog:
    """One call as both sides number it."""

    call_id: str
    local: str
    """Our address with its tag, as it stands in From of our requests."""
    remote: str
    """The peer's address with its tag."""
    target: Uri
    """The Contact of the peer."""
    routes: list[str] = field(default_factory=list)
    """Route headers of our requests."""
    flow: Flow | None = None
    """The way to a peer whose Contact cannot be reached, such as one behind NAT; None: its Contact or first route."""
    local_sequence: int = 0
    remote_sequence: int = -1

    @classmethod
    def of_request(cls, request: SipRequest, flow: Flow) -> "Dialog":
        """The dialog of an INVITE that a peer has sent."""
        local = f"{request.get('To')};tag={new_tag()}"
        target = request.contact or request.from_address.uri
        dialog = cls(request.call_id, local, request.get("From") or "", target, request.all("Record-Route"))
        dialog.received(request, flow)
        return dialog

    @classmethod
    def to(cls, uri: Uri, own: str) -> "Dialog":
        """The dialog of an INVITE of ours; it has no tag of the peer until that answers."""
        return cls(new_tag(), f"{own};tag={new_tag()}", f"<{uri}>", uri)

    def answered(self, response: SipResponse, flow: Flow) -> None:
        """Note the tag, the Contact and the route of the peer that has answered our INVITE."""
        self.remote = response.get("To") or self.remote
        self.target = response.contact or self.target
        self.routes = response.all("Record-Route")[::-1]
        self._note_flow(flow)

    @property
    def id(self) -> DialogId:
        return self.call_id, SipAddress.parse(self.local).tag, SipAddress.parse(self.remote).tag

    @property
    def local_tag(self) -> str:
        return self.id[1]

    @property
    def next_hop(self) -> Destination:
        """Where our requests are sent."""
        first = SipAddress.parse(self.routes[0]).uri if self.routes else self.target
        return first.destination

    def received(self, request: SipRequest, flow: Flow) -> None:
        """Note the sequence number, the Contact and the way of a request of the peer."""
        self.remote_sequence = request.cseq[0]
        if request.method in ("INVITE", "UPDATE"):
            self.target = request.contact or self.target
            self._note_flow(flow)

    def _note_flow(self, flow: Flow) -> None:
        is_behind_nat = not self.routes and self.target.host != flow.remote[0]
        self.flow = flow if is_behind_nat or flow.transport != "udp" else None

    def is_in_order(self, request: SipRequest) -> bool:
        """Whether a request is newer than the last one."""
        return request.cseq[0] > self.remote_sequence

    def request(self, method: str, via: str, sequence: int | None = None) -> SipRequest:
        """A request within the dialog; `sequence` is given for an ACK, which has that of its INVITE."""
        if sequence is None:
            self.local_sequence += 1
        headers: Headers = [
            ("Via", via),
            ("Max-Forwards", MAX_FORWARDS),
            *(("Route", route) for route in self.routes),
            ("From", self.local),
            ("To", self.remote),
            ("Call-ID", self.call_id),
            ("CSeq", f"{self.local_sequence if sequence is None else sequence} {method}"),
        ]
        return SipRequest(method, self.target, headers)


def via_header(transport: str, host: str, port: int) -> str:
    """A Via header of ours with a new branch; the peer is asked to answer to where the request came from."""
    return f"SIP/2.0/{transport.upper()} {host_port(host, port)};branch={new_branch()};rport"
