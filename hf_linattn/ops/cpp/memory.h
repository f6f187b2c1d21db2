// What a thread computes in.

#pragma once

#include <cstdint>
#include <vector>

// Memory of a thread, kept from call to call: fresh pages would take longer than a small attention.
class Memory {
    static constexpr int64_t LINE = 16;  // floats: vectors that lie in two lines of cache take twice as long
    std::vector<float> kept_;
    float* free_ = nullptr;

public:
    // For `pieces` of so many numbers together.
    void reserve(int64_t count, int64_t pieces) {
        count += (pieces + 1) * LINE;
        if (static_cast<int64_t>(kept_.size()) < count) kept_.resize(count);
        free_ = kept_.data();
    }
    float* take(int64_t count) {
        const auto address = reinterpret_cast<uintptr_t>(free_);
        float* found = free_ + (-address / sizeof(float)) % LINE;
        free_ = found + count;
        return found;
    }
    static Memory& own() {
        static thread_local Memory one;
        return one;
    }
};
