// A gate made of the value: log_decay = log sigmoid(w_h . v + b_h) / temperature, of each key head.

#pragma once

#include <cmath>

#include "tiles.h"

struct Gate {
    int64_t weight, bias;  // float32 [Hkv, Dv] and [Hkv], dense; 0 for no gate
    double temperature;

    float log_decay(int64_t head, const float* value, int wide) const {
        const float* own = reinterpret_cast<const float*>(weight) + head * wide;
        const int whole = wide / WIDTH * WIDTH;
        float logit = reinterpret_cast<const float*>(bias)[head] + dot(own, value, whole);
        for (int e = whole; e < wide; ++e) logit += own[e] * value[e];
        // of NaN too
        const float gate = (logit > 0 ? 0 : logit) - std::log1p(std::exp(-std::abs(logit)));
        return gate / static_cast<float>(temperature);
    }
};
