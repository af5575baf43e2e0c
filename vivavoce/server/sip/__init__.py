"""Telephone calls over SIP: messages, transactions, dialogs, SDP, and the user agent that answers calls."""
