// Compiled structures and token tables that Python holds, for every binding that takes one.
#pragma once
#include "../csrc/drafting/structure.h"
#include "handles.h"

namespace speceyes::binding {

using drafting::Structure;
using drafting::TokenBytes;

Handles<const Structure>& structures();
Handles<const TokenBytes>& tables();

}  // namespace speceyes::binding
