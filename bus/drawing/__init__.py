"""How fleets are drawn, in pictures and on pages: colours of versions, and spans on a lane."""
