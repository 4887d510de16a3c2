"""The policy of allowed addresses. It checks the addresses that a name resolved to, never the name.

Refuses everything but public unicast addresses, in any notation, and also public addresses of cloud
providers' internal services. For an IPv6 address that embeds an IPv4 address, both are checked.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# In addition to what ``is_global`` excludes. Azure's host agent has a public address; the rest are tunnels
# and translation prefixes, documentation, and ranges that Python versions disagree about.
_REFUSED: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "168.63.129.16/32", "100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15", "240.0.0.0/4",
        "64:ff9b:1::/48", "100::/64", "2001::/23", "2001:db8::/32", "3fff::/20", "5f00::/16", "fec0::/10",
    )
)  # fmt: skip
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    """The policy.

    ``allow_private`` allows every address, for hosts that the operator configured or trusts.
    """

    allow_private: bool = False

    def allows(self, text: str) -> bool:
        """Returns whether an address from the resolver is allowed; one with a zone ("%eth0") is not."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return self.allow_private and "%" in text
        return self.allow_private or is_public(address)


def is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        inner = _embedded(address)
        if inner is not None:
            return is_public(inner)
        if address.scope_id is not None or address not in _GLOBAL_UNICAST:
            return False
    if address.is_multicast or address.is_unspecified or not address.is_global:
        return False
    return not any(address.version == net.version and address in net for net in _REFUSED)


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Returns the embedded IPv4 destination of mapped, compatible, 6to4 and NAT64 addresses."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    number = int(address)
    if address in _NAT64 or number >> 32 == 0:
        return ipaddress.IPv4Address(number & 0xFFFFFFFF)
    return None
